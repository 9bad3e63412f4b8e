"""Plugin whose import fails, as on a host without the vendor's libraries."""

raise ImportError("libacme.so.3: cannot open shared object file")
