"""The reallocator: moves running samples between instances, so that none is overloaded while another idles."""
