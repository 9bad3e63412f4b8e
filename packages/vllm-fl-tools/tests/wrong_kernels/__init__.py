"""Incorrect kernels, by kind of fault, that measure what verification and the kit find.

Each is correct except for one fault, chosen so that an engine would serve wrong tokens.
`python -m wrong_kernels` (in the parent folder, or `nox -s wrong-kernels`) runs them all.
"""
