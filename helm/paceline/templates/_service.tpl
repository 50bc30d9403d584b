{{/* Services. */}}

{{/* Protocol of the gRPC ports, as a service mesh is told: it must not look into TLS that is not its own. */}}
{{- define "paceline.appProtocol" -}}
{{ if include "paceline.tls" . }}tls{{ else }}grpc{{ end }}
{{- end -}}

{{/* The service of a component. Takes root and component. Callers know by the registry who is there, so they are
let through before the pod is ready. */}}
{{- define "paceline.service" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "paceline.name" . }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "paceline.labels" . | nindent 4 }}
spec:
  {{- if .headless }}
  clusterIP: None
  {{- end }}
  publishNotReadyAddresses: true
  selector:
    {{- include "paceline.selector" . | nindent 4 }}
  ports:
    {{- $name := include "paceline.portName" . }}
    {{- $protocol := ternary (ternary "https" "http" (eq (include "paceline.tls" .root) "true")) (include "paceline.appProtocol" .root) (eq $name "http") }}
    - {name: {{ $name }}, port: {{ include "paceline.port" . }}, targetPort: {{ $name }}, appProtocol: {{ $protocol }}}
{{- end -}}
