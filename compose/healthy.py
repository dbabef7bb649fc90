#!/usr/bin/env python
"""Health check of a container: exit 0 if the URL answers 200."""

import sys
import urllib.error
import urllib.request

try:
    with urllib.request.urlopen(sys.argv[1], timeout=4) as answer:
        sys.exit(0 if answer.status == 200 else 1)
except (urllib.error.URLError, OSError) as error:
    sys.exit(str(error))
