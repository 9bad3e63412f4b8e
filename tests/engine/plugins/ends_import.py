"""Plugin that ends the process on import, without an error message, like an aborting library."""

import os

os._exit(3)
