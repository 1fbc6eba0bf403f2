from ourshard.checkpoint.conversion import convert as convert
from ourshard.checkpoint.inspection import inspect as inspect
from ourshard.checkpoint.source import CheckpointError as CheckpointError
from ourshard.checkpoint.source import detect as detect
from ourshard.checkpoint.verification import verify as verify
