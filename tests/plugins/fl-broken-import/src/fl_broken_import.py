"""Plugin that fails on import, like on a host without the vendor's libraries."""

raise ImportError("libacme.so.3: cannot open shared object file")
