-- Arguments: the secret, "own" or "all", the idempotency key, the body to post or "none", then the paths. With "all" a
-- thread cycles through the paths, with "own" each of several threads keeps to its own. The key: "none", or a text that
-- every request has, or one that ends in "*", which becomes another in every request.
local threads = 0

function setup(thread)
  threads = threads + 1
  thread:set("index", threads)
end

function init(args)
  local paths, key, body = {}, args[3], args[4]
  for i = 5, #args do paths[#paths + 1] = args[i] end
  if args[2] == "own" then paths = { paths[index] } end
  local headers = { ["Authorization"] = "Bearer " .. args[1], ["User-Agent"] = "wrk" }
  if key ~= "none" then headers["Idempotency-Key"] = key end
  local method = body == "none" and "GET" or "POST"
  if method == "POST" then headers["Content-Type"] = "application/json" else body = nil end
  before, after, at, drawn = {}, {}, 0, 0
  for i, path in ipairs(paths) do
    local made = wrk.format(method, path, headers, body)
    local star = key:sub(-1) == "*" and made:find("*\r\n", made:find("Idempotency-Key", 1, true), true)
    before[i] = star and made:sub(1, star - 1) or made
    after[i] = star and made:sub(star + 1)
  end
end

function request()
  at = at % #before + 1
  if not after[at] then return before[at] end
  drawn = drawn + 1
  return string.format("%s%02d-%09d%s", before[at], index, drawn, after[at])
end

function done(summary, latency)
  local e = summary.errors
  io.write(string.format(
    '\n{"requests": %d, "microseconds": %d, "bytes": %d, "p50": %d, "p99": %d, "status": %d, "socket": %d}\n',
    summary.requests, summary.duration, summary.bytes, latency:percentile(50), latency:percentile(99), e.status,
    e.connect + e.read + e.write + e.timeout))
end
