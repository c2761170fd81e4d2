"""Claims: who attempts what, until when, and what became of it; once, for every table that has them.

`model` has the words and what each table promises, `postgres` and `sqlite` are its two forms, and `leases` keeps what a
process holds.
"""
