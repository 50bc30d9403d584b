{{/* Rules of the file. Where PodMonitors give targets the labels of namespace and release, they judge this release alone:
else each of several would report all of them. */}}
{{- define "paceline.rules" -}}
{{- $file := .Files.Get "files/rules.yaml" }}
{{- if not .Values.monitoring.podMonitors.enabled }}
{{- $file }}
{{- else }}
{{- $own := printf "{namespace=%q,release=%q" .Release.Namespace .Release.Name }}
{{- $release := dict "release" .Release.Name }}
{{- $content := $file | fromYaml }}
{{- range $content.groups }}
{{- range .rules }}
{{- $all := regexReplaceAll `(?:[a-z]+:)?paceline_[a-z0-9_]+(?::[a-z0-9_]+)?` .expr (printf "${0}%s}" $own) }}
{{- $_ := set . "expr" ($all | replace (printf "%s}{" $own) (printf "%s," $own)) }}
{{- $_ := set . "labels" (merge (dict) (.labels | default dict) $release) }}
{{- end }}
{{- end }}
{{- toYaml $content }}
{{- end }}
{{- end -}}
