"""A shop in Django: what the view accepts is on disk when it answers, and the handler stores it once.

`POST /orders` hands the order to the daemon of this machine, which keeps it whatever happens next, and answers 202. A
consumer (`postroom consumer run --config consumer.toml`) posts it to `/handle`, as often as it takes; the key of the
message is stored in the transaction of the order.
"""
