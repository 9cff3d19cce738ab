"""Checksums of files, and of JSON objects that carry their own."""

from __future__ import annotations

import json
from typing import Any

import google_crc32c

SEAL = "crc32c"


def checksum(content: bytes) -> str:
    """CRC-32C (RFC 3720, appendix B.4) of bytes, as hexadecimal."""
    return f"{google_crc32c.value(content):08x}"


def seal(fields: dict[str, Any]) -> str:
    """The checksum of a JSON object's other fields, to stand in it as `crc32c`."""
    return checksum(json.dumps({key: fields[key] for key in fields if key != SEAL}, sort_keys=True).encode())
