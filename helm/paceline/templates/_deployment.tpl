{{/* The deployment of a service that has one pod at work. Takes root, component, replicas, strategy, config and
reads (whether it looks at models). */}}
{{- define "paceline.deployment" -}}
{{- $values := get .root.Values .component -}}
{{- include "paceline.withPodValues" (dict "root" .root "values" $values) -}}
{{- $it := dict "root" .root "component" .component "config" .config "values" $values "reads" (default false .reads) "spread" true -}}
{{- $_ := set $it "tolerations" (include "paceline.leaveDeadNodes" . | fromYaml).tolerations -}}
{{- $_ := set $it "grace" (add 15 (get .config "shutdown_grace_seconds" | default 10)) -}}
{{- $_ := set $it "container" (include "paceline.serviceContainer" $it) -}}
{{- $_ := set $it "mounts" (include "paceline.mounts" .root) -}}
{{- $_ := set $it "volumes" (include "paceline.volumes" .) -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "paceline.metadata" $it | nindent 2 }}
spec:
  replicas: {{ .replicas | int }}
  {{- include "paceline.strategy" (dict "name" "strategy" "values" $values "default" .strategy) | nindent 2 }}
  selector:
    matchLabels:
      {{- include "paceline.selector" . | nindent 6 }}
  template:
    {{- include "paceline.podTemplate" $it | nindent 4 }}
{{- end -}}

{{/* Container of a service that is deployed so. */}}
{{- define "paceline.serviceContainer" -}}
name: {{ .component }}
image: {{ include "paceline.image" (dict "root" .root "image" .root.Values.image.control) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args: [services.{{ .component }}]
env:
  {{- include "paceline.environment" (dict "root" .root "component" .component "advertise" (include "paceline.host" .) "config" .config "extraEnv" .values.extraEnv) | nindent 2 }}
  {{- if and (eq .component "gateway") (not (hasKey .config "leader_host")) }}
  - name: PACELINE_LEADER_HOST
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  {{- end }}
  {{- if eq .component "facade" }}
  - name: PACELINE_GATEWAY
    value: {{ include "paceline.host" (dict "root" .root "component" "gateway") }}:{{ .root.Values.gateway.service.port | int }}
  {{- if not (hasKey .config "allowed_hosts") }}
  - name: PACELINE_ALLOWED_HOSTS
    value: {{ include "paceline.facadeNames" .root | quote }}
  {{- end }}
  {{- if and (gt (int .values.replicas) 1) (not (hasKey .config "alone")) }}
  - name: PACELINE_ALONE
    value: "false"
  {{- end }}
  {{- end }}
  {{- if eq .component "policy" }}
  {{- include "paceline.scalingEnvironment" .root | nindent 2 }}
  {{- end }}
ports:
  {{- include "paceline.ports" . | nindent 2 }}
{{ include "paceline.probes" (dict "startupSeconds" 120) }}
resources:
  {{- toYaml .values.resources | nindent 2 }}
{{- end -}}

{{/* Names under which callers without a token may reach the facade, as JSON: those of its service and of the ways
from outside. */}}
{{- define "paceline.facadeNames" -}}
{{- $it := dict "root" . "component" "facade" -}}
{{- $name := include "paceline.name" $it -}}
{{- $names := list $name (printf "%s.%s" $name .Release.Namespace) (printf "%s.%s.svc" $name .Release.Namespace) (include "paceline.host" $it) -}}
{{- if .Values.facade.ingress.enabled }}{{ $names = concat $names .Values.facade.ingress.hosts }}{{ end -}}
{{- if .Values.facade.route.enabled }}{{ $names = concat $names .Values.facade.route.hostnames }}{{ end -}}
{{- $names | uniq | toJson -}}
{{- end -}}
