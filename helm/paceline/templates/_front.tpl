{{/* The ways from outside of the cluster to a service: Ingress and routes of the Gateway API. */}}

{{/* Both of a component, where its values ask for them. Takes root, component and port. */}}
{{- define "paceline.front" -}}
{{- $values := get .root.Values .component -}}
{{- if $values.ingress.enabled }}
---
{{ include "paceline.ingress" (merge (dict "values" $values.ingress) .) }}
{{- end }}
{{- if $values.route.enabled }}
---
{{ include "paceline.route" (merge (dict "values" $values.route) .) }}
{{- end }}
{{- end -}}

{{- define "paceline.ingress" -}}
{{- if not .values.hosts }}{{ fail (printf "%s.ingress.hosts is needed with %s.ingress.enabled" .component .component) }}{{ end -}}
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  name: {{ include "paceline.name" . }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "paceline.labels" . | nindent 4 }}
  {{- with .values.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with .values.className }}
  ingressClassName: {{ . }}
  {{- end }}
  {{- with .values.tls }}
  tls:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  rules:
    {{- range .values.hosts }}
    - host: {{ . | quote }}
      http:
        paths:
          - path: /
            pathType: Prefix
            backend: {service: {name: {{ include "paceline.name" $ }}, port: {number: {{ $.port | int }}}}}
    {{- end }}
{{- end -}}

{{- define "paceline.route" -}}
{{- if not .values.parentRefs }}{{ fail (printf "%s.route.parentRefs is needed with %s.route.enabled" .component .component) }}{{ end -}}
{{- if and (eq .values.kind "TLSRoute") (not (include "paceline.tls" .root)) }}
{{- fail (printf "%s.route.kind: a TLSRoute passes TLS on, and tls.mode is none" .component) }}
{{- end -}}
apiVersion: {{ include "paceline.routeApi" .values }}
kind: {{ .values.kind }}
metadata:
  name: {{ include "paceline.name" . }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "paceline.labels" . | nindent 4 }}
  {{- with .values.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  parentRefs:
    {{- toYaml .values.parentRefs | nindent 4 }}
  {{- with .values.hostnames }}
  hostnames:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  rules:
    - backendRefs:
        - {name: {{ include "paceline.name" . }}, port: {{ .port | int }}}
{{- end -}}

{{/* API group and version of a route. Takes its values. */}}
{{- define "paceline.routeApi" -}}
gateway.networking.k8s.io/{{ .apiVersion | default "v1" }}
{{- end -}}
