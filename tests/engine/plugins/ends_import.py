"""A plugin whose import ends the process without a word, as a library that aborts does."""

import os

os._exit(3)
