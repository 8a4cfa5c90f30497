// node drive.mjs <queue> <command> ..: as benchmarks/queue/drive.py, for the queues of Node.
import { createSocket } from 'node:dgram'
import { performance } from 'node:perf_hooks'
import pg from 'pg'

const BATCH = 1000
const WARM_UP = 500
const LEAST = 20
const PLACED = 'INSERT INTO placed (n) VALUES ($1)'
const url = process.env.DATABASE_URL
const port = Number(process.env.BENCHMARK_STAMPS ?? 9)
const sleep = (ms) => new Promise((done) => setTimeout(done, ms))

const socket = createSocket('udp4')
const noop = async () => {}
// hrtime is CLOCK_MONOTONIC, as time.monotonic_ns() of Python.
const stamp = (n) => socket.send(`${n} ${process.hrtime.bigint()}`, port, '127.0.0.1')

const queues = {
  async graphile(callers) {
    const { makeWorkerUtils, run, runMigrations } = await import('graphile-worker')
    const pool = new pg.Pool({ connectionString: url, max: callers })
    let utils
    return {
      schema: () => runMigrations({ connectionString: url }),
      async open() { utils = await makeWorkerUtils({ pgPool: pool }) },
      async close() { await utils.release(); await pool.end() },
      one: (n, task) => utils.addJob(task, { n }),
      many: (ns, task) => utils.addJobs(ns.map((n) => ({ identifier: task, payload: { n } }))),
      async inside(n, task) {
        const client = await pool.connect()
        await client.query('BEGIN')
        await client.query(PLACED, [n])
        await client.query('SELECT graphile_worker.add_job($1, $2::json)', [task, JSON.stringify({ n })])
        await client.query('COMMIT')
        client.release()
      },
      async work() {
        const runner = await run({
          preset: {
            worker: {
              connectionString: url,
              concurrentJobs: 50,
              maxPoolSize: 51,
              localQueue: { size: 1000 },
              completeJobBatchDelay: 0,
              failJobBatchDelay: 0,
            },
          },
          taskList: { noop, stamp: async ({ n }) => stamp(n) },
        })
        await runner.promise
      },
    }
  },

  async pgboss(callers) {
    const { default: PgBoss } = await import('pg-boss')
    const pool = new pg.Pool({ connectionString: url, max: callers })
    const boss = new PgBoss({ connectionString: url, max: callers, schedule: false })
    return {
      async schema() {
        await boss.start()
        for (const task of ['noop', 'stamp']) await boss.createQueue(task)
        await boss.stop({ graceful: false })
      },
      open: () => boss.start(),
      async close() { await boss.stop({ graceful: false }); await pool.end() },
      one: (n, task) => boss.send(task, { n }),
      many: (ns, task) => boss.insert(ns.map((n) => ({ name: task, data: { n } }))),
      async inside(n, task) {
        const client = await pool.connect()
        await client.query('BEGIN')
        await client.query(PLACED, [n])
        await boss.send(task, { n }, { db: { executeSql: (text, values) => client.query(text, values) } })
        await client.query('COMMIT')
        client.release()
      },
      async work() {
        await boss.start()
        await boss.work('stamp', { pollingIntervalSeconds: 0.5 }, async ([job]) => stamp(job.data.n))
        const loop = async () => {
          for (;;) {
            const jobs = await boss.fetch('noop', { batchSize: BATCH })
            if (jobs.length === 0) { await sleep(100); continue }
            await Promise.all(jobs.map(noop))
            await boss.complete('noop', jobs.map((job) => job.id))
          }
        }
        await Promise.all([loop(), loop()])
      },
    }
  },
}

const [name, command, ...rest] = process.argv.slice(2)
const task = process.env.BENCHMARK_TASK ?? 'noop'
const callers = command === 'one' || command === 'inside' ? Number(rest[0]) : 4
const queue = await queues[name](callers)
const numbers = (from, count) => Array.from({ length: count }, (_, place) => from + place)
const seconds = (began) => (performance.now() - began) / 1000

async function many(limit, jobs) {
  if (limit) await queue.many(numbers(0, BATCH), task)
  let made = 0
  const began = performance.now()
  while (made < jobs && (!limit || seconds(began) < limit)) {
    const size = Math.min(BATCH, jobs - made)
    await queue.many(numbers(made, size), task)
    made += size
  }
  return { jobs: made, seconds: seconds(began), before: limit ? BATCH : 0 }
}

async function singly(once, limit) {
  let number = 0
  const burst = async (ms) => {
    const began = performance.now()
    const until = began + ms
    const call = async () => {
      let mine = 0
      while (performance.now() < until) { mine += 1; number += 1; await once(number, task) }
      return mine
    }
    const made = (await Promise.all(Array.from({ length: callers }, call))).reduce((one, other) => one + other)
    return [made, seconds(began)]
  }
  const [before] = await burst(WARM_UP)
  const [jobs, taken] = await burst(limit * 1000)
  return { jobs, seconds: taken, before }
}

async function latency(times, limit) {
  let expected, arrived
  const listening = createSocket('udp4')
  listening.on('message', (data) => {
    const [n, started] = data.toString().split(' ')
    if (Number(n) === expected) arrived(BigInt(started))
  })
  await new Promise((done) => listening.bind(port, '127.0.0.1', done))
  let n = 0
  const once = async (within) => {
    n += 1
    const started = new Promise((done) => { expected = n; arrived = done })
    const began = process.hrtime.bigint()
    await queue.one(n, task)
    const at = await Promise.race([started, sleep(within).then(() => null)])
    return at === null ? null : Number(at - began) / 1e6
  }
  const start = performance.now()
  while ((await once(1000)) === null) if (seconds(start) > 15) throw new Error('no job started')
  for (let warm = 0; warm < 5; warm += 1) await once(15000)
  const taken = []
  const measured = performance.now()
  while (taken.length < times && (taken.length < LEAST || seconds(measured) < limit)) {
    await sleep(15 + 20 * Math.random())
    const ms = await once(15000)
    if (ms === null) throw new Error('the job did not start')
    taken.push(ms)
  }
  listening.close()
  return taken
}

if (command === 'schema') {
  await queue.schema()
} else if (command === 'work') {
  await queue.work()
} else {
  await queue.open()
  const told =
    command === 'many' ? await many(Number(rest[0]), Number(rest[1]))
      : command === 'one' ? await singly(queue.one, Number(rest[1]))
        : command === 'inside' ? await singly(queue.inside, Number(rest[1]))
          : await latency(Number(rest[0]), Number(rest[1]))
  await queue.close()
  console.log(JSON.stringify(told))
}
process.exit(0)
