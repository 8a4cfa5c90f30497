-- Arguments: the secret, then the paths. One thread cycles through them; of several, each keeps to its own.
local threads = 0

function setup(thread)
  threads = threads + 1
  thread:set("index", threads)
end

function init(args)
  local paths = {}
  for i = 3, #args do paths[#paths + 1] = args[i] end
  if args[2] == "own" then paths = { paths[index] } end
  requests, at = {}, 0
  for i, path in ipairs(paths) do
    requests[i] = wrk.format("GET", path, { ["Authorization"] = "Bearer " .. args[1], ["User-Agent"] = "wrk" })
  end
end

function request()
  at = at % #requests + 1
  return requests[at]
end

function done(summary, latency)
  local e = summary.errors
  io.write(string.format(
    '\n{"requests": %d, "microseconds": %d, "bytes": %d, "p50": %d, "p99": %d, "status": %d, "socket": %d}\n',
    summary.requests, summary.duration, summary.bytes, latency:percentile(50), latency:percentile(99), e.status,
    e.connect + e.read + e.write + e.timeout))
end
