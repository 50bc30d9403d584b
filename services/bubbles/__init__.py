"""The bubble coordinator: gives idle instances samples of coming steps to pre-generate."""
