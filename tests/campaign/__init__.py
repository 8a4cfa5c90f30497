"""The fault campaign: real servers, real faults, and a checker that reads the database's own records.

    python -m tests.campaign [--short] [--only NAME] [--report FILE] [--seed N]

Every scenario begins with a PostgreSQL of its own and ends everything that it started. The parts:

    __main__    the command line
    report      the table
    scenarios   what is done to the servers, one coroutine a scenario
    stage       PostgreSQL, roles, proxies, PgBouncer and servers of one scenario
    callers     the load, and every answer it was given
    observer    locks, connections and memory, watched from outside
    checks      the questions to the database that decide whether the promise held
    standby     a replica that is promoted
    servers     one `cronlock serve` process
    tables      the tables that the tasks write
    tasks       the tasks that the servers serve

# Why the checks are sound

Each lock has one counter row. A run that has its lock reads the counter, in a statement after the one that took the
lock, and inserts the value that it read with its id and the time: its begin marker. It works, writes back what it
read plus one, and ends its marker. All of that is in the transaction of the run, so only committed runs show.

Two runs of a lock overlap if each began its work before the other was committed. Then, at READ COMMITTED,
neither read what the other wrote, and both read the same value: a value that two committed markers carry is
such a pair, or hides one. The other way round, runs that come one after the other read 0, 1, 2 and so on, because
a transaction's changes are visible before its locks are free. So no overlap means exactly that the committed
markers of a lock are a chain: each value once, as many as the counter says. No constraint of the tables stands in
the way of a violation: the counter is written without a condition, markers have no key, and the row lock of the counter
makes a second run only wait for the first before it writes the same value again.

The chain is one witness. There are two more, which depend on other things. The server notes when a transaction was
committed (`track_commit_timestamp`), before it frees its locks: no run of a lock may have begun before its
predecessor in the chain was committed, by the server's clock. And run ids grow in the order in which the lock was
taken, so the ids of a chain grow.

A call's number is in its User-Agent, which cronlock keeps as the caller of the run, and in the marker. So an answer, a
run and a marker are told to belong together by the database alone, also if an id were given twice.

What it cannot see: code that runs beside another run's and whose work is rolled back (the promise allows that), and
a fault that no run of a campaign met.
"""
