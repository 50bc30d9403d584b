{{/* Generation instances: their container and its volumes. All take root, component and values, those of the pool. */}}

{{- define "paceline.instanceContainer" -}}
{{- $images := .root.Values.image -}}
{{- $service := dict "root" .root "component" "generation" -}}
{{- $address := printf "$(POD_NAME).%s" (include "paceline.host" $service) -}}
{{- $cuda := eq .values.device "cuda" -}}
name: generation
image: {{ include "paceline.image" (dict "root" .root "image" (ternary $images.generationCuda $images.generationCpu $cuda)) }}
imagePullPolicy: {{ $images.pullPolicy }}
args: [services.generation]
env:
  {{- include "paceline.environment" (dict "root" .root "component" "generation" "advertise" $address "config" .values.config "extraEnv" .values.extraEnv) | nindent 2 }}
  - name: PACELINE_INSTANCE_ID
    value: $(POD_NAME)
  - name: PACELINE_POOL
    value: {{ .values.name | quote }}
  - name: PACELINE_MIGRATION_PORT
    value: "7510"
  - name: PACELINE_EVACUATION_SECONDS
    value: {{ .values.evacuationSeconds | quote }}
  {{- if not (hasKey .values.config "model") }}
  - name: PACELINE_MODEL
    value: {{ .root.Values.model.path | quote }}
  {{- end }}
  {{- if and $cuda (not (hasKey .values.config "tensor_parallel_size")) }}
  - name: PACELINE_TENSOR_PARALLEL_SIZE
    value: {{ .values.gpus | quote }}
  {{- end }}
  {{- if include "paceline.adoptedVolume" .values }}
  - name: PACELINE_ADOPTED_WEIGHTS
    value: /adopted
  {{- end }}
  {{- if and .root.Values.drafter.enabled (not (hasKey .values.config "eagle3")) }}
  - name: PACELINE_EAGLE3
    value: {{ include "paceline.drafterCheckpoint" .root | quote }}
  {{- end }}
  {{- with include "paceline.offline" .values.extraEnv }}
  {{- . | nindent 2 }}
  {{- end }}
ports:
  {{- include "paceline.ports" $service | nindent 2 }}
  # One for each GPU.
  - {name: kv, containerPort: 7510}
{{ include "paceline.probes" (dict "startupSeconds" .values.startupSeconds) }}
resources:
  {{- $resources := deepCopy .values.resources }}
  {{- if $cuda }}
  {{- $_ := set $resources "limits" (merge (dict .values.gpuResource (.values.gpus | int)) ($resources.limits | default dict)) }}
  {{- end }}
  {{- toYaml $resources | nindent 2 }}
{{- end -}}

{{- define "paceline.instanceMounts" -}}
{{ include "paceline.mounts" .root }}
- {name: shm, mountPath: /dev/shm}
{{- if include "paceline.adoptedVolume" .values }}
- {name: adopted, mountPath: /adopted}
{{- end }}
{{- end -}}

{{- define "paceline.instanceVolumes" -}}
{{ include "paceline.volumes" (dict "root" .root "component" "generation" "cache" (include "paceline.cacheVolume" .values)) }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .values.shmSize }}}
{{- with include "paceline.adoptedVolume" .values }}
- name: adopted
  {{- . | nindent 2 }}
{{- end }}
{{- end -}}
