"""Kvine's cache inside other libraries. Each module needs its library, and says so where it is imported without."""
