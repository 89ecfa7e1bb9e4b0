"""Any tree as a list of arrays with names, and a static rest that puts it together again."""
