{{/* Ports of containers, and what the kubelet asks them. */}}

{{/* Name of a component's port, which says its protocol. */}}
{{- define "paceline.portName" -}}
{{ if eq .component "facade" }}http{{ else }}grpc{{ end }}
{{- end -}}

{{/* Port of probes: plain HTTP, whatever the TLS of the others, so that kubelet asks by itself and no process is started.
No network policy opens it: a node always reaches its own pods. */}}
{{- define "paceline.probePort" -}}
7481
{{- end -}}

{{/* Ports of a container. Takes root and component. */}}
{{- define "paceline.ports" -}}
- {name: {{ include "paceline.portName" . }}, containerPort: {{ include "paceline.port" . }}}
- {name: metrics, containerPort: 9400}
- {name: probes, containerPort: {{ include "paceline.probePort" . }}}
{{- end -}}

{{/* Probes of a container. Takes startupSeconds. A service is restarted when its event loop has hung for three minutes: on a
busy node healthy ones are slow. */}}
{{- define "paceline.probes" -}}
startupProbe:
  httpGet: {port: probes, path: /livez}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add .startupSeconds 4) 5 }}
livenessProbe:
  httpGet: {port: probes, path: /livez}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 9
readinessProbe:
  httpGet: {port: probes, path: /readyz}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end -}}
