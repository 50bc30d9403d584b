{{/* Certificates and tokens: which secrets hold them. */}}

{{/* "true" if TLS is on, else empty. */}}
{{- define "paceline.tls" -}}
{{- if ne .Values.tls.mode "none" }}true{{ end -}}
{{- end -}}

{{/* Secret with the certificate of a component. Takes root and component. */}}
{{- define "paceline.tlsSecret" -}}
{{- $tls := .root.Values.tls -}}
{{- if eq $tls.mode "certManager" -}}
{{ include "paceline.name" . }}-tls
{{- else -}}
{{- $name := get $tls.secretNames .component | default $tls.secretName -}}
{{- required (printf "tls.secretName or tls.secretNames.%s is needed with tls.mode secrets" .component) $name -}}
{{- end -}}
{{- end -}}

{{/* DNS name in a component's certificate. Takes root and component. */}}
{{- define "paceline.serverName" -}}
{{- $given := ternary .root.Values.tls.serverName "" (eq .root.Values.tls.mode "secrets") -}}
{{- default (include "paceline.host" .) $given -}}
{{- end -}}

{{/* Secrets with the services' own token and with the grants of callers. */}}
{{- define "paceline.tokenSecret" -}}
{{ default (printf "%s-token" (include "paceline.fullname" .)) .Values.tokens.services.existingSecret }}
{{- end -}}
{{- define "paceline.grantsSecret" -}}
{{ default (printf "%s-grants" (include "paceline.fullname" .)) .Values.tokens.existingSecret }}
{{- end -}}

{{/* Secret with the token of Prometheus. */}}
{{- define "paceline.metricsTokenSecret" -}}
{{- if and .Values.tokens.existingSecret (not .Values.tokens.metrics.existingSecret) }}
{{- fail "tokens.metrics.existingSecret: is needed to scrape with tokens.existingSecret" }}
{{- end -}}
{{ default (printf "%s-metrics-token" (include "paceline.fullname" .)) .Values.tokens.metrics.existingSecret }}
{{- end -}}

{{/* "true" if the chart makes Prometheus's token and its grant, else empty. */}}
{{- define "paceline.metricsGrant" -}}
{{- if not (or .Values.tokens.metrics.existingSecret .Values.tokens.existingSecret) }}true{{ end -}}
{{- end -}}

{{/* Secret with Redis's passwords. */}}
{{- define "paceline.redisSecret" -}}
{{ default (printf "%s-redis" (include "paceline.fullname" .)) .Values.redis.embedded.existingSecret }}
{{- end -}}
