"""A cluster of processes: what the chart renders is run as a kubelet and the controllers would, on this machine.

Pure: `spec` (pods out of manifests), `controllers` (what to create and delete next), `dns` (names and endpoints),
`policies` (who may connect to whom), `images` (what the Dockerfile says of an image). Stand-ins: `certificates`
(cert-manager), `charts` (Helm in a cluster), `valkey` (its image). Processes: `network` (addresses, Services and
network policies), `container` (enters a container's namespaces), `kubelet` (one pod), `volumes`, `cluster`.

As in a cluster: every pod has an address of its own, and nothing gets into it that network policies do not let in;
every container has a root file system of its own, read-only where the chart says so, with volumes at the paths of
the manifests, and runs as process 1 and as the user of the manifest, without any capability, with the environment
of the manifest and the image and nothing else. Different: images are this repository at its own path; names are in
/etc/hosts; Services are relayed by a process; policies are for ports up to 32767; the first questions about
readiness come sooner, and nobody asks for liveness; controllers know the strategies that the chart has; and there
are no limits of memory and processors, no preStop hooks and no ConfigMaps as volumes (`spec` refuses what it does
not play), and no Kubernetes API, and so no `autoscale`.
"""
