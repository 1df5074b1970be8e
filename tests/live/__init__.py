"""Assumptions about the true Hub, each said to be true or false: `ZOO_LIVE=1 python -m tests.live`, under 200 MB.

Nothing here runs by itself: tests need `ZOO_LIVE=1`. The assumptions are those that were written down without a
network; where one is false, the package looks at the bytes and decides, but the documents should be corrected.
"""
