{{/* Names, labels and addresses. */}}

{{/* Prefix of all names. 24 characters leave room for "-generation-", a pool and what Kubernetes appends. */}}
{{- define "paceline.fullname" -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- $both := ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) -}}
{{- default $both .Values.fullnameOverride | trunc 24 | trimSuffix "-" -}}
{{- end -}}

{{/* Name of a component's resources. Takes root and component, and pool if there is one. */}}
{{- define "paceline.name" -}}
{{- $name := printf "%s-%s" (include "paceline.fullname" .root) .component -}}
{{- if .pool }}{{ printf "%s-%s" $name .pool }}{{ else }}{{ $name }}{{ end -}}
{{- end -}}

{{/* Labels that select a component's pods. Takes root, component and optionally pool. */}}
{{- define "paceline.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- if .pool }}
paceline.io/pool: {{ .pool | quote }}
{{- end }}
{{- end -}}

{{/* Labels of a component's resources. Takes root, component and optionally pool. */}}
{{- define "paceline.labels" -}}
{{ include "paceline.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: paceline
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | quote }}
{{- end -}}

{{/* DNS name of a component's service. Takes root and component. */}}
{{- define "paceline.host" -}}
{{ include "paceline.name" . }}.{{ .root.Release.Namespace }}.svc.{{ .root.Values.clusterDomain }}
{{- end -}}

{{/* Prefix of all keys in Redis. */}}
{{- define "paceline.keyPrefix" -}}
{{ default (printf "%s.%s" .Release.Namespace (include "paceline.fullname" .)) .Values.redis.keyPrefix }}
{{- end -}}

{{/* Deployed components, with their ports and their callers. */}}
{{- define "paceline.components" -}}
{{- $all := dict
  "gateway" (dict "port" 7400 "callers" (list "gateway" "policy" "test"))
  "generation" (dict "port" 7500 "callers" (list "gateway" "reallocator" "policy" "generation"))
  "redis" (dict "port" 6379 "callers" (list "gateway" "generation" "reallocator" "bubbles" "drafts" "policy"))
-}}
{{- if .Values.drafter.enabled }}
{{- $_ := set $all "drafter" (dict "port" 7450 "callers" (list "gateway")) }}
{{- range list "generation" "redis" }}
{{- $_ := set (get $all .) "callers" (append (get $all .).callers "drafter") }}
{{- end }}
{{- end }}
{{- if not .Values.redis.embedded.enabled }}{{ $all = omit $all "redis" }}{{ end -}}
{{- if .Values.reallocator.enabled }}
{{- $_ := set $all "reallocator" (dict "port" 7440 "callers" list) }}
{{- end }}
{{- if .Values.bubbles.enabled }}
{{- $_ := set $all "bubbles" (dict "port" 7420 "callers" (list "gateway" "generation")) }}
{{- end }}
{{- if .Values.drafts.enabled }}
{{- $_ := set $all "drafts" (dict "port" 7410 "callers" (list "gateway" "generation")) }}
{{- end }}
{{- if .Values.facade.enabled }}
{{- $_ := set $all "facade" (dict "port" 7480 "callers" list) }}
{{- $_ := set (get $all "gateway") "callers" (append (get $all "gateway").callers "facade") }}
{{- end }}
{{- if .Values.policy.enabled }}
{{- $_ := set $all "policy" (dict "port" 7430 "callers" (list "gateway")) }}
{{- end }}
{{- toYaml $all -}}
{{- end -}}

{{/* Port of a component. Takes root and component. */}}
{{- define "paceline.port" -}}
{{- get (get (include "paceline.components" .root | fromYaml) .component) "port" | int -}}
{{- end -}}

{{/* An image of ours. Takes root and image: repository and digest. */}}
{{- define "paceline.image" -}}
{{- with .root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{ .image.repository }}:{{ default .root.Chart.AppVersion .root.Values.image.tag }}
{{- with .image.digest }}@{{ . }}{{ end -}}
{{- end -}}

{{/* Pools, merged with the defaults; under "pools" in a map, for fromYaml. */}}
{{- define "paceline.pools" -}}
{{- $pools := list -}}
{{- $names := dict -}}
{{- range .Values.generation.pools -}}
{{- if hasKey $names .name }}{{ fail (printf "generation.pools: two are called %s" .name) }}{{ end -}}
{{- $_ := set $names .name true -}}
{{- $pool := dict -}}
{{- range $key, $value := $.Values.generation.defaults }}{{ $_ := set $pool $key $value }}{{ end -}}
{{- range $key, $value := . }}{{ $_ := set $pool $key $value }}{{ end -}}
{{- $config := dict -}}
{{- range $key, $value := $.Values.generation.defaults.config }}{{ $_ := set $config $key $value }}{{ end -}}
{{- range $key, $value := (.config | default dict) }}{{ $_ := set $config $key $value }}{{ end -}}
{{- $_ := set $pool "config" $config -}}
{{- include "paceline.withPodValues" (dict "root" $ "values" $pool) -}}
{{- if gt (int $pool.minReplicas) (int $pool.maxReplicas) }}
{{- fail (printf "generation.pools: minReplicas of %s is above maxReplicas" $pool.name) }}
{{- end -}}
{{- $pools = append $pools $pool -}}
{{- end -}}
{{- dict "pools" $pools | toYaml -}}
{{- end -}}

{{/* Folder of EAGLE-3 heads, at the same path in the pods of learner and instances. */}}
{{- define "paceline.drafterFolder" -}}
{{ trimSuffix "/" .Values.weights.mountPath }}/drafters
{{- end -}}

{{/* First EAGLE-3 head. */}}
{{- define "paceline.drafterCheckpoint" -}}
{{ required "drafter.checkpoint is needed with drafter.enabled" .Values.drafter.checkpoint }}
{{- end -}}

{{/* Scaler of a pool: policy, hpa, keda, or "" for none. Takes root and pool (its values). */}}
{{- define "paceline.scaler" -}}
{{- if and .root.Values.autoscale.enabled .pool.scaled }}
{{- if not .root.Values.policy.enabled }}
{{- fail "autoscale.enabled: needs policy.enabled, which says how many instances there should be" }}
{{- end }}
{{- .root.Values.autoscale.by }}
{{- end -}}
{{- end -}}

{{/* "true" if the policy service sets the number of instances, else empty. */}}
{{- define "paceline.scales" -}}
{{- if and .Values.autoscale.enabled (eq .Values.autoscale.by "policy") }}true{{ end -}}
{{- end -}}
