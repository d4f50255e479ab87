"""Resident adapters: where their weights lie, and how they are added to the base model's linears."""

from marlaas.lora.bank import AdapterBank
from marlaas.lora.layers import LoraBatch
from marlaas.lora.layout import AdapterLayout, AdapterShape, targets_of
from marlaas.lora.paging import PagedAdapters
from marlaas.lora.peft_format import export_peft, import_peft
from marlaas.lora.segment import Segment

__all__ = [
    "AdapterBank",
    "AdapterLayout",
    "AdapterShape",
    "LoraBatch",
    "PagedAdapters",
    "Segment",
    "export_peft",
    "import_peft",
    "targets_of",
]
