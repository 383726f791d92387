"""What the environment switches on for every command of the command line."""

import os

from jaxspec.errors import InputError

KPOOL_METADATA_FUSION = "JAXSPEC_EXPERIMENTAL_DSA_KPOOL_METADATA_FUSION"


def kpool_metadata_fusion() -> bool:
    """Whether one kernel shall write all metadata of a forward of a sparse model: `SpecConfig.kpool_metadata_fusion`.

    A command reads it once and hands it on.

    Raises:
      InputError: the variable is neither 0, 1, empty nor absent.
    """
    value = os.environ.get(KPOOL_METADATA_FUSION, "")
    if value not in ("", "0", "1"):
        raise InputError(f"{KPOOL_METADATA_FUSION}={value!r}: must be 1 for fused metadata, or 0, or not be set")
    return value == "1"
