"""From a log to a store: read a source, check its records, sort, filter and write."""
