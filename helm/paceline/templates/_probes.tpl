{{/* Ports of containers, and what the kubelet asks them. */}}

{{/* Name of a component's port, which says its protocol. */}}
{{- define "paceline.portName" -}}
{{ if eq .component "facade" }}http{{ else }}grpc{{ end }}
{{- end -}}

{{/* Ports of a container. Takes root and component. */}}
{{- define "paceline.ports" -}}
- {name: {{ include "paceline.portName" . }}, containerPort: {{ include "paceline.port" . }}}
- {name: metrics, containerPort: 9400}
{{- end -}}

{{/* Health check. Takes root, component and service ("" or "liveness"). The kubelet asks itself
where there is no TLS: it speaks none. */}}
{{- define "paceline.ask" -}}
{{- $port := include "paceline.port" . -}}
{{- if eq .component "facade" -}}
{{- $path := ternary "/livez" "/readyz" (eq .service "liveness") -}}
{{- if include "paceline.tls" .root -}}
exec:
  command:
    - python
    - -m
    - services.facade.probe
    - --address=127.0.0.1:{{ $port }}
    - --server-name={{ include "paceline.serverName" . }}
    - --path={{ $path }}
{{- else -}}
httpGet: {port: {{ $port }}, path: {{ $path }}}
{{- end -}}
{{- else if include "paceline.tls" .root -}}
exec:
  command:
    - python
    - -m
    - services.platform.grpc.health
    - --address=127.0.0.1:{{ $port }}
    - --server-name={{ include "paceline.serverName" . }}
    - --service={{ .service }}
{{- else -}}
grpc: {port: {{ $port }}, service: {{ .service | quote }}}
{{- end -}}
{{- end -}}

{{/* Probes of a container. Takes root, component and startupSeconds. */}}
{{- define "paceline.probes" -}}
{{- $live := dict "root" .root "component" .component "service" "liveness" -}}
{{- $ready := dict "root" .root "component" .component "service" "" -}}
startupProbe:
  {{- include "paceline.ask" $live | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add .startupSeconds 4) 5 }}
livenessProbe:
  {{- include "paceline.ask" $live | nindent 2 }}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 3
readinessProbe:
  {{- include "paceline.ask" $ready | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end -}}
