"""Jobs whose steps happen exactly once: the digits of the ledgers, their tables, and the primitives that move them."""
