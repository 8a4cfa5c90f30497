"""The queue's benchmark: what jobs cost in cronlock, beside five other queues on PostgreSQL."""
