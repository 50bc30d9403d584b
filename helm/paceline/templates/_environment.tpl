{{/* Environment of the services. services/platform/config.py refuses unknown variables. */}}

{{/* Settings as variables. Takes a map of settings. */}}
{{- define "paceline.settings" -}}
{{- range $name, $value := . }}
- name: PACELINE_{{ upper $name }}
  value: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}
{{- end }}
{{- end -}}

{{/* Variables of every service. Takes root, component, advertise, config and extraEnv. */}}
{{- define "paceline.environment" -}}
{{- $values := .root.Values -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: PACELINE_HOST
  value: "0.0.0.0"
- name: PACELINE_PORT
  value: {{ include "paceline.port" . | quote }}
- name: PACELINE_METRICS_PORT
  value: "9400"
- name: PACELINE_PROBE_PORT
  value: {{ include "paceline.probePort" . | quote }}
- name: PACELINE_ADVERTISE_HOST
  value: {{ .advertise | quote }}
- name: PACELINE_NAMESPACE
  value: {{ include "paceline.keyPrefix" .root | quote }}
{{- if ne .component "facade" }}
{{ include "paceline.redisEnvironment" . }}
{{- end }}
{{- if include "paceline.tls" .root }}
- name: PACELINE_TLS__CERT_FILE
  value: /etc/paceline/tls/tls.crt
- name: PACELINE_TLS__KEY_FILE
  value: /etc/paceline/tls/tls.key
- name: PACELINE_TLS__CA_FILE
  value: /etc/paceline/tls/ca.crt
- name: PACELINE_TLS__CLIENT_AUTH
  value: {{ $values.tls.clientAuth | quote }}
{{- if and $values.tls.serverName (eq $values.tls.mode "secrets") }}
- name: PACELINE_TLS__SERVER_NAME
  value: {{ $values.tls.serverName | quote }}
{{- end }}
{{- else }}
- name: PACELINE_INSECURE
  value: "true"
{{- end }}
- name: PACELINE_TOKEN_FILE
  value: /etc/paceline/token/{{ $values.tokens.services.secretKey }}
- name: PACELINE_TOKENS_FILE
  value: /etc/paceline/grants
{{- with $values.tracing.endpoint }}
- name: PACELINE_TRACING_ENDPOINT
  value: {{ . | quote }}
- name: PACELINE_TRACING_SAMPLE_RATIO
  value: {{ $values.tracing.sampleRatio | quote }}
{{- end }}
{{- if and (has .component (list "gateway" "generation")) $values.weights.enabled (not (hasKey .config "weights_root")) }}
- name: PACELINE_WEIGHTS_ROOT
  value: {{ $values.weights.mountPath | quote }}
{{- end }}
{{- include "paceline.settings" .config }}
{{- with .extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Scaling settings of the policy service. It recommends for every pool that may be scaled, and sets their
numbers only where it is the one to. */}}
{{- define "paceline.scalingEnvironment" -}}
{{- $pools := list -}}
{{- range (include "paceline.pools" $ | fromYaml).pools -}}
{{- if .scaled -}}
{{- $name := include "paceline.name" (dict "root" $ "component" "generation" "pool" .name) -}}
{{- $pools = append $pools (dict "name" $name "minimum" (.minReplicas | int) "maximum" (.maxReplicas | int)) -}}
{{- end -}}
{{- end -}}
- name: PACELINE_SCALING__POOLS
  value: {{ toJson $pools | quote }}
- name: PACELINE_SCALING__APPLY
  value: {{ eq (include "paceline.scales" $) "true" | quote }}
- name: PACELINE_SCALING__GATEWAY
  value: {{ include "paceline.host" (dict "root" $ "component" "gateway") }}:{{ .Values.gateway.service.port | int }}
- name: PACELINE_SCALING__LEASE_NAME
  value: {{ include "paceline.fullname" $ }}-scaling
{{- range $name, $value := .Values.autoscale.config }}
- name: PACELINE_SCALING__{{ upper $name }}
  value: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}
{{- end }}
{{- end -}}

{{/* No model is downloaded, unless `extraEnv`, which is taken here, says otherwise. */}}
{{- define "paceline.offline" -}}
{{- $own := false -}}
{{- range . }}{{ if eq .name "HF_HUB_OFFLINE" }}{{ $own = true }}{{ end }}{{ end -}}
{{- if not $own -}}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end -}}
{{- end -}}
