"""What the bytes of a plane mean, and the quantizers that write them; one file per format."""

from . import serialization  # noqa: F401  (torch.load with weights_only knows our classes)
