"""TRL's trainers with a logprobd service as their reference model; needs the extra `[trl]`.

`import logprobd_client` never imports this.
"""

from logprobd_client.trl.dpo import RemoteReferenceDPOMixin, RemoteReferenceDPOTrainer
from logprobd_client.trl.grpo import RemoteReferenceGRPOTrainer, RemoteReferenceMixin, RemoteReferenceRLOOTrainer
from logprobd_client.trl.identity import ReferenceChangedError, ReferenceIdentityCallback
from logprobd_client.trl.waiting import ReferenceFailedError

__all__ = [
    "ReferenceChangedError",
    "ReferenceFailedError",
    "ReferenceIdentityCallback",
    "RemoteReferenceDPOMixin",
    "RemoteReferenceDPOTrainer",
    "RemoteReferenceGRPOTrainer",
    "RemoteReferenceMixin",
    "RemoteReferenceRLOOTrainer",
]
