"""Wrong kernels, by kind: what verification at start and the conformance kit are judged by.

Each is right apart from one fault, and written as somebody would who wants wrong tokens served.
`python -m wrong_kernels` (in the folder above, or `nox -s wrong-kernels`) runs them all.
"""
