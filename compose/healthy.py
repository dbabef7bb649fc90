#!/usr/bin/env python
"""Health check of a container: exit 0 if the URL answers 200."""

import os
import sys
import urllib.error
import urllib.request

try:
    request = urllib.request.Request(sys.argv[1])
    if key := os.environ.get("HEADRACE_API_KEY"):
        request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=4) as answer:
        sys.exit(0 if answer.status == 200 else 1)
except (urllib.error.URLError, OSError) as error:
    sys.exit(str(error))
