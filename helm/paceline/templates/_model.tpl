{{/* The model: where it comes from, and how pods wait for it. */}}

{{/* How the model comes to `model.path`: image, job (to the volume of weights), instance (each downloads its own), or ""
if it is there already. */}}
{{- define "paceline.modelFrom" -}}
{{- $model := .Values.model -}}
{{- $path := printf "%s/" (trimSuffix "/" $model.path) -}}
{{- $shared := and .Values.weights.enabled (hasPrefix (printf "%s/" (trimSuffix "/" .Values.weights.mountPath)) $path) -}}
{{- if and $model.image.reference $model.download.source }}
{{- fail "model: image.reference and download.source exclude each other" }}
{{- else if $model.image.reference }}
{{- if $shared }}{{ fail "model.path: must not be on the volume of weights, weights.mountPath, with model.image.reference" }}{{ end -}}
image
{{- else if $model.download.source }}
{{- if and .Values.weights.enabled (not $shared) }}
{{- fail "model.path: must be below weights.mountPath, to which model.download.source is downloaded" }}
{{- end -}}
{{ ternary "job" "instance" .Values.weights.enabled }}
{{- end -}}
{{- end -}}

{{/* "true" for a pod that has the model on a volume of its own. Takes what `paceline.podTemplate` does. */}}
{{- define "paceline.modelOfItsOwn" -}}
{{- $from := include "paceline.modelFrom" .root -}}
{{- if or (eq $from "image") (and (eq $from "instance") (eq .component "generation")) }}true{{ end -}}
{{- end -}}

{{/* Give model.download the values of `pods`, but no sidecars, with which its Job would never end. */}}
{{- define "paceline.withDownloadValues" -}}
{{- $download := .Values.model.download -}}
{{- if not (hasKey $download "extraContainers") }}{{ $_ := set $download "extraContainers" list }}{{ end -}}
{{- include "paceline.withPodValues" (dict "root" . "values" $download) -}}
{{- end -}}

{{/* Container that downloads the model, without its name. Takes root and wait, whether it waits for somebody else's
download instead. */}}
{{- define "paceline.downloader" -}}
{{- $download := .root.Values.model.download -}}
image: {{ include "paceline.image" (dict "root" .root "image" .root.Values.image.control) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args:
  - services.models
  - --source={{ $download.source }}
  - --folder={{ .root.Values.model.path }}
  {{- if .wait }}
  - --wait
  {{- else if $download.checksums }}
  - --checksums={{ $download.checksums }}
  {{- end }}
{{- if not .wait }}
{{- $token := "" }}
{{- with $download.existingSecret }}{{ $token = printf "- name: HF_TOKEN\n  valueFrom: {secretKeyRef: {name: %s, key: %s}}\n" . $download.secretKey }}{{ end }}
{{- with printf "%s%s" $token (ternary "" (toYaml $download.extraEnv) (empty $download.extraEnv)) }}
env:
  {{- trim . | nindent 2 }}
{{- end }}
{{- end }}
resources:
  {{- toYaml (ternary (dict "requests" (dict "cpu" "10m" "memory" "64Mi") "limits" (dict "cpu" "1" "memory" "256Mi")) $download.resources (default false .wait)) | nindent 2 }}
{{- end -}}

{{/* First container of a pod that reads the model: waits for the Job, or downloads; "" where the model is there already, and
for an instance that has another one. Takes what `paceline.podTemplate` does. */}}
{{- define "paceline.modelContainer" -}}
{{- $from := include "paceline.modelFrom" .root -}}
{{- $own := include "paceline.modelOfItsOwn" . -}}
{{- if and (or (eq $from "job") (and $own (eq $from "instance"))) (not (hasKey .values.config "model")) -}}
{{- include "paceline.withDownloadValues" .root -}}
- name: model
  {{- include "paceline.downloader" (dict "root" .root "wait" (eq $from "job")) | nindent 2 }}
  securityContext:
    {{- include "paceline.context" .values.securityContext | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: cache, mountPath: /cache}
    {{- if $own }}
    - {name: model, mountPath: {{ .root.Values.model.path }}}
    {{- else }}
    {{- include "paceline.weightsMount" .root | nindent 4 }}
    {{- end }}
    {{- if and $own .root.Values.model.download.extraVolumeMounts }}
    {{- toYaml .root.Values.model.download.extraVolumeMounts | nindent 4 }}
    {{- end }}
{{- end -}}
{{- end -}}

{{/* Mounts of a container that reads models and weights. Takes what `paceline.podTemplate` does. */}}
{{- define "paceline.modelMounts" -}}
{{- if .root.Values.weights.enabled }}
{{ include "paceline.weightsMount" .root }}
{{- end }}
{{- if include "paceline.modelOfItsOwn" . }}
- {name: model, mountPath: {{ .root.Values.model.path }}, readOnly: true}
{{- end }}
{{- end -}}

{{/* Volumes of those mounts. Takes what `paceline.podTemplate` does, and writes, whether a folder of the volume of weights is
mounted for writing as well. */}}
{{- define "paceline.modelVolumes" -}}
{{- if .root.Values.weights.enabled }}
{{ include "paceline.weightsVolume" . }}
{{- end }}
{{- if include "paceline.modelOfItsOwn" . }}
- name: model
  {{- if .root.Values.model.image.reference }}
  image: {reference: {{ .root.Values.model.image.reference | quote }}, pullPolicy: {{ .root.Values.model.image.pullPolicy }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .root.Values.model.download.size }}}
  {{- end }}
{{- end }}
{{- end -}}
