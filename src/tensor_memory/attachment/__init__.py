"""Put the memory on an existing Transformer, take it off, switch it off for a while."""

from tensor_memory.attachment.attach_detach import attach, attachment_of, detach, memory_disabled
from tensor_memory.attachment.attachment import Attachment
from tensor_memory.attachment.blocks import NoBlocksFoundError
from tensor_memory.attachment.memory_layers import MemoryLayer, memory_inside, memory_layers
from tensor_memory.attachment.stream import Stream

__all__ = [
    "Attachment",
    "MemoryLayer",
    "NoBlocksFoundError",
    "Stream",
    "attach",
    "attachment_of",
    "detach",
    "memory_disabled",
    "memory_inside",
    "memory_layers",
]
