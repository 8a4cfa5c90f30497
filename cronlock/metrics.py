"""What is counted in this process, and how it and the cluster's state are told to Prometheus.

A skip costs a fraction of a microsecond more: it is counted in plain numbers, and only a scrape makes metrics of
them. Every label is the name of a registered task or a word of cronlock's own, whatever is called.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from cronlock.models import JOB_ENDS, RUN_STATUSES, SKIP_REASONS
from cronlock.targets import Targets
from cronlock.tasks import Registry

ENDED = tuple(status for status in RUN_STATUSES if status not in ("running", "skipped"))
DECISION_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
DURATION_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
UNAUTHORIZED = (("cron", "missing"), ("cron", "mismatch"), ("admin", "missing"), ("admin", "mismatch"))

WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0, 600.0, 3600.0, 21600.0)
OTHER = "other"
"""The label of a queue or a task that nobody who is there has registered."""

Cluster = Mapping[str, Sequence[Mapping[str, Any]]]
"""The rows of `stats.gauges`."""


class Distribution:
    """How many of what was observed lay below each bound; whole milliseconds come, and seconds are told."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = [bound * 1000 for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0

    def observe(self, milliseconds: int) -> None:
        """Count one."""
        self._counts[bisect_left(self._bounds, milliseconds)] += 1
        self._sum += milliseconds

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Tell Prometheus, whose buckets are cumulative."""
        told, below = [], 0
        for bound, number in zip((*(str(bound / 1000) for bound in self._bounds), "+Inf"), self._counts, strict=True):
            below += number
            told.append((bound, float(below)))
        family.add_metric(labels, told, self._sum / 1000)


class JobCounts(Protocol):
    """What a worker tells of its attempts."""

    def job_started(self, task: str, due_ms: int) -> None:
        """See `Metrics`."""

    def job_ended(self, task: str, status: str, age_ms: int) -> None:
        """See `Metrics`."""

    def jobs_recovered(self, number: int = 1) -> None:
        """See `Metrics`."""

    def lease_lost(self) -> None:
        """See `Metrics`."""


class Metrics:
    """The counters of one `Cronlock`, for as long as it lives.

    `registry` is a prometheus_client registry with what this process has counted; `/metrics` shows it together with
    what the database says.
    """

    def __init__(self, tasks: Registry, targets: Targets | None = None) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(Counted(self))
        self.pools: Callable[[], Mapping[str, Mapping[str, int]]] = dict
        """The statistics of the connection pools, as psycopg_pool gives them."""
        self._tasks = tasks
        self._targets = Targets() if targets is None else targets
        self._told: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._starts: defaultdict[str, int] = defaultdict(int)
        self._ends: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._skips: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._durations: defaultdict[str, Distribution] = defaultdict(lambda: Distribution(DURATION_BUCKETS))
        self._runs, self._passes = Distribution(DECISION_BUCKETS), Distribution(DECISION_BUCKETS)
        self._unauthorized = dict.fromkeys(UNAUTHORIZED, 0)
        self._unavailable: defaultdict[str, int] = defaultdict(int)
        self._recoveries = 0
        self._pruned = 0
        self._enqueued: defaultdict[tuple[str, bool], int] = defaultdict(int)
        self._jobs: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._waits: defaultdict[str, Distribution] = defaultdict(lambda: Distribution(WAIT_BUCKETS))
        self._ages: defaultdict[str, Distribution] = defaultdict(lambda: Distribution(WAIT_BUCKETS))
        self._job_recoveries = 0
        self._leases_lost = 0

    def started(self, task: str, decided_ms: int) -> None:
        """A call became a run, `decided_ms` after it came."""
        self._starts[task] += 1
        self._runs.observe(decided_ms)

    def skipped(self, task: str, reason: str, decided_ms: int) -> None:
        """A call was skipped."""
        self._skips[task, reason] += 1
        self._passes.observe(decided_ms)

    def ended(self, task: str, status: str, duration_ms: int) -> None:
        """A run of this process ended."""
        self._ends[task, status] += 1
        self._durations[task].observe(duration_ms)

    def recovered(self, number: int = 1) -> None:
        """Runs were found lost and closed by this process."""
        self._recoveries += number

    def pruned(self, number: int) -> None:
        """Old rows were deleted by this process."""
        self._pruned += number

    def delivered(self, target: str, number: int) -> None:
        """A target took so many rows of what is invalidated."""
        self._told[target, "delivered"] += number

    def not_delivered(self, target: str) -> None:
        """A delivery to a target failed."""
        self._told[target, "failed"] += 1

    def enqueued(self, task: str, is_duplicate: bool) -> None:
        """A call was given a job, its own or that of an earlier one."""
        self._enqueued[task, is_duplicate] += 1

    def job_started(self, task: str, due_ms: int) -> None:
        """An attempt at a job began here, so many milliseconds after it was due."""
        self._waits[task].observe(due_ms)

    def job_ended(self, task: str, status: str, age_ms: int) -> None:
        """An attempt ended here, and left its job in this status; `age_ms` after the job was enqueued."""
        self._jobs[task, status] += 1
        if status != "queued":
            self._ages[task].observe(age_ms)

    def jobs_recovered(self, number: int = 1) -> None:
        """Jobs of workers that are gone were taken back by this process."""
        self._job_recoveries += number

    def lease_lost(self) -> None:
        """A worker of this process lost the lease of a job that it had begun."""
        self._leases_lost += 1

    def unauthorized(self, scope: str, reason: str) -> None:
        """A call was answered 401."""
        self._unauthorized[scope, reason] += 1

    def unavailable(self, reason: str) -> None:
        """A call was answered 503; `reason` is one of cronlock's own."""
        self._unavailable[reason] += 1

    def families(self) -> Iterator[Metric]:
        """Everything that was counted, as it is at this moment."""
        names, nothing = [task.name for task in self._tasks], Distribution(DURATION_BUCKETS)
        starts = CounterMetricFamily("cronlock_starts", "Calls that became a run.", labels=["task"])
        ends = CounterMetricFamily("cronlock_runs", "Runs that ended, by how.", labels=["task", "status"])
        skips = CounterMetricFamily("cronlock_skips", "Calls that were skipped.", labels=["task", "reason"])
        durations = HistogramMetricFamily("cronlock_run_duration_seconds", "How long runs took.", labels=["task"])
        for name in names:
            starts.add_metric([name], self._starts.get(name, 0))
            for status in ENDED:
                ends.add_metric([name, status], self._ends.get((name, status), 0))
            for reason in SKIP_REASONS:
                skips.add_metric([name, reason], self._skips.get((name, reason), 0))
            self._durations.get(name, nothing).add_to(durations, [name])
        decisions = HistogramMetricFamily(
            "cronlock_decision_seconds", "From a call's arrival to its run's start or its skip.", labels=["decision"]
        )
        self._runs.add_to(decisions, ["run"])
        self._passes.add_to(decisions, ["skip"])
        unauthorized = CounterMetricFamily("cronlock_unauthorized", "Answers of 401.", labels=["scope", "reason"])
        for labels, number in self._unauthorized.items():
            unauthorized.add_metric(labels, number)
        unavailable = CounterMetricFamily("cronlock_unavailable", "Answers of 503.", labels=["reason"])
        for reason, number in list(self._unavailable.items()):
            unavailable.add_metric([reason], number)
        recoveries = CounterMetricFamily("cronlock_recoveries", "Runs found lost and closed.", self._recoveries)
        pruned = CounterMetricFamily("cronlock_pruned_rows", "Rows deleted after their retention.", self._pruned)
        rows = CounterMetricFamily("cronlock_invalidations_delivered", "Rows that targets took.", labels=["target"])
        failed = CounterMetricFamily(
            "cronlock_invalidation_failures", "Deliveries that targets did not take.", labels=["target"]
        )
        for name in self._targets.names:
            rows.add_metric([name], self._told.get((name, "delivered"), 0))
            failed.add_metric([name], self._told.get((name, "failed"), 0))
        yield from (starts, ends, skips, durations, decisions, unauthorized, unavailable, recoveries, pruned)
        yield from (rows, failed)
        yield from self._job_families(names)
        yield from self._pool_families()

    def _job_families(self, names: Sequence[str]) -> Iterator[Metric]:
        nothing = Distribution(WAIT_BUCKETS)
        enqueued = CounterMetricFamily(
            "cronlock_enqueued",
            "Calls that were given a job, by whether it was there before.",
            labels=["task", "duplicate"],
        )
        ends = CounterMetricFamily("cronlock_jobs_ended", "Jobs that ended, by how.", labels=["task", "status"])
        retries = CounterMetricFamily(
            "cronlock_job_retries", "Attempts after which a job waits for another.", labels=["task"]
        )
        waits = HistogramMetricFamily(
            "cronlock_job_start_seconds", "From when a job was due to the beginning of an attempt.", labels=["task"]
        )
        ages = HistogramMetricFamily("cronlock_job_finish_seconds", "From a job's enqueue to its end.", labels=["task"])
        for name in names:
            for is_duplicate in (False, True):
                enqueued.add_metric([name, str(is_duplicate).lower()], self._enqueued.get((name, is_duplicate), 0))
            for status in JOB_ENDS:
                ends.add_metric([name, status], self._jobs.get((name, status), 0))
            retries.add_metric([name], self._jobs.get((name, "queued"), 0))
            self._waits.get(name, nothing).add_to(waits, [name])
            self._ages.get(name, nothing).add_to(ages, [name])
        recoveries = CounterMetricFamily(
            "cronlock_job_recoveries", "Jobs taken back from workers that were gone.", self._job_recoveries
        )
        losses = CounterMetricFamily("cronlock_leases_lost", "Leases that this worker lost.", self._leases_lost)
        yield from (enqueued, ends, retries, waits, ages, recoveries, losses)

    def _pool_families(self) -> Iterator[Metric]:
        used = GaugeMetricFamily("cronlock_pool_used_connections", "Connections lent out.", labels=["pool"])
        open_now = GaugeMetricFamily("cronlock_pool_open_connections", "Connections open.", labels=["pool"])
        limit = GaugeMetricFamily("cronlock_pool_max_connections", "Connections at most.", labels=["pool"])
        waiting = GaugeMetricFamily("cronlock_pool_waiting", "Who waits for a connection.", labels=["pool"])
        for pool, stats in self.pools().items():
            used.add_metric([pool], stats.get("pool_size", 0) - stats.get("pool_available", 0))
            open_now.add_metric([pool], stats.get("pool_size", 0))
            limit.add_metric([pool], stats.get("pool_max", 0))
            waiting.add_metric([pool], stats.get("requests_waiting", 0))
        yield from (used, open_now, limit, waiting)

    def expose(self, cluster: Cluster | None, accept: str) -> tuple[bytes, str]:
        """The text of a scrape and its content type; `cluster` is None if the database could not be asked."""
        encode, content_type = choose_encoder(accept)
        registry = CollectorRegistry()
        registry.register(Counted(self))
        registry.register(Seen(cluster, {task.queue for task in self._tasks}))
        return encode(registry), content_type


class Counted(Collector):
    """What this process has counted."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """The families, made anew for every scrape."""
        return self._metrics.families()

    def describe(self) -> Iterator[Metric]:
        """Nothing: their names are known to nobody else."""
        return iter(())


class Seen(Collector):
    """What the database says, the same whichever process is asked."""

    def __init__(self, cluster: Cluster | None, queues: Collection[str] = ()) -> None:
        self._cluster = cluster
        self._queues = set(queues)

    def describe(self) -> Iterator[Metric]:
        """Nothing; as above."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """`cronlock_up`, and the rest if the database answered."""
        is_up = self._cluster is not None
        yield GaugeMetricFamily("cronlock_up", "Whether the database answered this scrape within 2 s.", int(is_up))
        if self._cluster is None:
            return
        yield from self._of_tasks(self._cluster)
        yield from self._of_all(self._cluster)
        yield from self._of_jobs(self._cluster)

    def _of_tasks(self, cluster: Cluster) -> Iterator[Metric]:
        paused = GaugeMetricFamily("cronlock_paused", "Whether the task is paused.", labels=["task"])
        started = GaugeMetricFamily(
            "cronlock_last_started_timestamp_seconds", "When the task's last run began.", labels=["task"]
        )
        completed = GaugeMetricFamily(
            "cronlock_last_completed_timestamp_seconds", "When the task last completed.", labels=["task"]
        )
        for row in cluster["tasks"]:
            paused.add_metric([row["task"]], int(row["is_paused"]))
            if row["last_started"] is not None:
                started.add_metric([row["task"]], row["last_started"])
            if row["last_completed"] is not None:
                completed.add_metric([row["task"]], row["last_completed"])
        running = GaugeMetricFamily("cronlock_running", "Runs that hold their lock now.", labels=["task"])
        longest = GaugeMetricFamily("cronlock_longest_run_seconds", "The age of its oldest run.", labels=["task"])
        for row in cluster["running"]:
            running.add_metric([row["task"]], row["running"])
            longest.add_metric([row["task"]], row["longest"])
        streaks = GaugeMetricFamily(
            "cronlock_skipped_in_a_row_seconds",
            "From the first to the last call that the holder of the lock now has caused to be skipped.",
            labels=["task"],
        )
        in_a_row = {row["task"]: row["skipped_ms"] / 1000 for row in cluster["blocked"]}
        for row in cluster["tasks"]:
            streaks.add_metric([row["task"]], in_a_row.get(row["task"], 0.0))
        yield from (paused, started, completed, running, longest, streaks)

    def _of_all(self, cluster: Cluster) -> Iterator[Metric]:
        running = cluster["running"]
        stopping, gone = (sum(row[name] for row in running) for name in ("stopping", "gone"))
        yield GaugeMetricFamily("cronlock_stopping", "Runs told to stop whose code has not returned.", stopping)
        yield GaugeMetricFamily("cronlock_unclosed", "Runs that lost their lock and are not closed yet.", gone)
        (lost,), (rows,) = cluster["lost"], cluster["rows"]
        yield GaugeMetricFamily(
            "cronlock_lost_last_day", "Runs lost in the last 24 h, of the newest 10,000 failures.", lost["lost"]
        )
        yield GaugeMetricFamily("cronlock_run_rows", "Rows of the table run; PostgreSQL's estimate.", rows["rows"])
        yield GaugeMetricFamily("cronlock_run_bytes", "Size of the table run and its indexes.", rows["bytes"])
        xmin = GaugeMetricFamily(
            "cronlock_oldest_xmin_transactions",
            "How many transactions ago the oldest snapshot or open write began, by who has it.",
            labels=["held_by"],
        )
        waiting = GaugeMetricFamily(
            "cronlock_invalidations_waiting", "Rows that a target has not taken yet, up to 10,000.", labels=["target"]
        )
        oldest = GaugeMetricFamily(
            "cronlock_invalidation_oldest_seconds",
            "The age of the oldest of them; 0 if there is none.",
            labels=["target"],
        )
        for row in cluster["invalidations"]:
            waiting.add_metric([row["target"]], row["waiting"])
            oldest.add_metric([row["target"]], row["oldest"])
        yield from (waiting, oldest)
        ages = {row["held_by"]: row["age"] for row in cluster["xmin"]}
        for held_by in ("run", "cronlock", "other", "prepared"):
            xmin.add_metric([held_by], ages.get(held_by) or 0.0)
        yield xmin

    def _of_jobs(self, cluster: Cluster) -> Iterator[Metric]:
        """By queue; of one that no task here and no worker names, as `other`."""
        known = self._queues.union(*(worker["queues"] for worker in cluster["workers"]))
        places = {"queued": 0.0, "processing": 0.0, "overdue": 0.0, "waiting": 0.0, "oldest": 0.0}
        queues = {queue: dict(places) for queue in sorted(known)}
        stranded: defaultdict[str, float] = defaultdict(float)
        for row in cluster["jobs"]:
            place = queues.setdefault(row["queue"] if row["queue"] in known else OTHER, dict(places))
            for name in ("queued", "processing", "overdue"):
                place[name] += row[name]
            place["oldest"] = max(place["oldest"], row["oldest"] or 0.0)
            if row["queued"] and not row["has_worker"]:
                stranded[row["task"] if row["is_known"] else OTHER] += row["queued"]
        for row in cluster["waiting"]:
            queues.setdefault(row["queue"] if row["queue"] in known else OTHER, dict(places))["waiting"] += row[
                "waiting"
            ]
        jobs = GaugeMetricFamily("cronlock_jobs", "Live jobs that are due or under way.", labels=["queue", "status"])
        waiting = GaugeMetricFamily("cronlock_jobs_waiting", "Jobs that wait for their time.", labels=["queue"])
        overdue = GaugeMetricFamily("cronlock_jobs_overdue", "Jobs whose lease has run out.", labels=["queue"])
        oldest = GaugeMetricFamily(
            "cronlock_queue_age_seconds",
            "For how long the job that is due longest waits for a worker.",
            labels=["queue"],
        )
        for queue, place in queues.items():
            jobs.add_metric([queue, "queued"], place["queued"])
            jobs.add_metric([queue, "processing"], place["processing"])
            waiting.add_metric([queue], place["waiting"])
            overdue.add_metric([queue], place["overdue"])
            oldest.add_metric([queue], place["oldest"])
        handlers = GaugeMetricFamily(
            "cronlock_jobs_without_worker", "Jobs that are due and that no worker there is takes.", labels=["task"]
        )
        for task, number in stranded.items():
            handlers.add_metric([task], number)
        workers = GaugeMetricFamily("cronlock_workers", "Workers that are there.", labels=["state"])
        there = cluster["workers"]
        draining, idle = (sum(bool(row[name]) for row in there) for name in ("is_draining", "is_idle"))
        for state, number in (("draining", draining), ("idle", idle), ("all", len(there))):
            workers.add_metric([state], number)
        yield from (jobs, waiting, overdue, oldest, handlers, workers)
        (dead,), (ended,) = cluster["dead"], cluster["ended"]
        yield GaugeMetricFamily(
            "cronlock_jobs_failed_last_day", "Jobs that failed in the last 24 h, of the newest 10,000.", dead["failed"]
        )
        yield GaugeMetricFamily("cronlock_job_history_rows", "Rows of job_history; an estimate.", ended["rows"])
        yield GaugeMetricFamily("cronlock_job_history_bytes", "Its size, with its indexes.", ended["bytes"])
