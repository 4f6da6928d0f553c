"""The heart: what of the past is kept, where, for whom, and until when.

Three independent parameters describe a cache: the spec (what a query may see), the codec (how values are stored) and
the budget. One mechanism, blocks with a life, serves them all.
"""
