"""The reallocator: moves running samples between instances, so that none is crowded while another idles."""
