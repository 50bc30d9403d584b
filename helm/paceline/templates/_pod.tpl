{{/* Pods: one template for those of all workloads, with what the values of `pods` and of a component say about them. */}}

{{/* Give the values of a component those of `pods` that it lacks; of security contexts, single fields. Takes root and
values, which it changes. */}}
{{- define "paceline.withPodValues" -}}
{{- range $name, $value := .root.Values.pods -}}
{{- $own := get $.values $name -}}
{{- if has $name (list "podSecurityContext" "securityContext") -}}
{{- $context := dict -}}
{{- range $field, $each := $value }}{{ $_ := set $context $field $each }}{{ end -}}
{{- range $field, $each := ($own | default dict) }}{{ $_ := set $context $field $each }}{{ end -}}
{{- $_ := set $.values $name $context -}}
{{- else if not (hasKey $.values $name) -}}
{{- $_ := set $.values $name $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The fields of a security context that are not null. */}}
{{- define "paceline.context" -}}
{{- $kept := dict -}}
{{- range $field, $each := . }}{{ if not (kindIs "invalid" $each) }}{{ $_ := set $kept $field $each }}{{ end }}{{ end -}}
{{- toYaml $kept -}}
{{- end -}}

{{/* Metadata of a workload. Takes root, component, values and optionally pool and name. */}}
{{- define "paceline.metadata" -}}
name: {{ .name | default (include "paceline.name" .) }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- merge (include "paceline.labels" . | fromYaml) (deepCopy .values.labels) | toYaml | nindent 2 }}
{{- with .values.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Update strategy, under the name that the kind of workload has for it. Takes name, values and default. */}}
{{- define "paceline.strategy" -}}
{{- with .values.updateStrategy | default .default -}}
{{ $.name }}:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* Template of a workload's pods. Takes root, component, values (of the component, with those of `pods`) and
optionally pool; podLabels, tolerations and spread (whether replicas go to different nodes) that the chart wants;
grace (seconds); reads (whether the model must be there before it starts); and container, mounts and volumes, as YAML. */}}
{{- define "paceline.podTemplate" -}}
metadata:
  labels:
    {{- merge (include "paceline.selector" . | fromYaml) (.podLabels | default dict) (deepCopy .values.podLabels) | toYaml | nindent 4 }}
  {{- with .values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "paceline.podHead" . | nindent 2 }}
  {{- with .grace }}
  terminationGracePeriodSeconds: {{ . }}
  {{- end }}
  {{- with .restart }}
  restartPolicy: {{ . }}
  {{- end }}
  {{- $model := "" }}
  {{- if .reads }}{{ $model = include "paceline.modelContainer" . }}{{ end }}
  {{- if or $model .values.initContainers }}
  initContainers:
    {{- with $model }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with .values.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - {{ .container | indent 6 | trim }}
      {{- with include "paceline.context" .values.securityContext | fromYaml }}
      securityContext:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        {{- .mounts | nindent 8 }}
        {{- if .reads }}
        {{- include "paceline.modelMounts" . | nindent 8 }}
        {{- end }}
        {{- with .values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with .values.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $volumes := list }}
  {{- range list (.volumes | default "") (ternary (include "paceline.modelVolumes" .) "" (default false .reads)) }}
  {{- with trim . }}{{ $volumes = append $volumes . }}{{ end }}
  {{- end }}
  {{- $extra := .values.extraVolumes }}
  {{- if and $model (eq (include "paceline.modelFrom" .root) "instance") }}
  {{- $extra = concat $extra .root.Values.model.download.extraVolumes | uniq }}
  {{- end }}
  {{- with $extra }}{{ $volumes = append $volumes (toYaml .) }}{{ end }}
  {{- with $volumes }}
  volumes:
    {{- join "\n" . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* First part of a pod's spec. Takes what `paceline.podTemplate` does. */}}
{{- define "paceline.podHead" -}}
{{- $values := .root.Values -}}
serviceAccountName: {{ include "paceline.fullname" .root }}{{ if eq .component "policy" }}-policy{{ end }}
automountServiceAccountToken: {{ and (eq .component "policy") (eq (include "paceline.scales" .root) "true") }}
# Variables of service links would begin with PACELINE_, too.
enableServiceLinks: false
{{- with $values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with include "paceline.context" .values.podSecurityContext | fromYaml }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $name := list "schedulerName" "priorityClassName" "runtimeClassName" "nodeSelector" }}
{{- with get $.values $name }}
{{ $name }}: {{ if kindIs "string" . }}{{ . }}{{ else }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}
{{- with concat (.tolerations | default list) .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .values.affinity }}
affinity:
  {{- toYaml .values.affinity | nindent 2 }}
{{- else if .spread }}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "paceline.selector" (dict "root" .root "component" .component) | nindent 14 }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  {{- $own := dict "labelSelector" (dict "matchLabels" (include "paceline.selector" $ | fromYaml)) }}
  - {{ merge (deepCopy .) (ternary dict $own (hasKey . "labelSelector")) | toYaml | nindent 4 | trim }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Tolerations by which a single pod leaves a lost node within seconds rather than minutes. */}}
{{- define "paceline.leaveDeadNodes" -}}
tolerations:
  - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 15}
  - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 15}
{{- end -}}
