"""The suffix index: what followed, in all known rollouts of a prompt, a text that ends like this one."""

from services.drafts.index.names import Name
from services.drafts.index.offers import Offers
from services.drafts.index.suffix_index import SuffixIndex, warm_up

__all__ = ["Name", "Offers", "SuffixIndex", "warm_up"]
