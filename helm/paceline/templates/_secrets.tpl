{{/* Secrets that the chart makes. */}}

{{/* Value of a secret that the chart created earlier, or else a new one, in base64. Takes root, name, key, prefix. */}}
{{- define "paceline.kept" -}}
{{- $found := lookup "v1" "Secret" .root.Release.Namespace .name -}}
{{- $data := get ($found | default dict) "data" | default dict -}}
{{- get $data .key | default (printf "%s%s" (.prefix | default "") (randAlphaNum 43) | b64enc) -}}
{{- end -}}

{{/* A secret with data that the chart makes, in no release manifest: a rollback would bring back what was rotated, or, with
Helm 4, be refused. It is a hook, which no rollback and no uninstallation touches, and which is there only where the cluster lacks the secret,
a key of it, or the annotation by which Helm leaves a secret alone that was in the manifest of an older chart.
Takes root, component, name and data. */}}
{{- define "paceline.keptSecret" -}}
{{- $found := lookup "v1" "Secret" .root.Release.Namespace .name | default dict -}}
{{- $there := get $found "data" | default dict -}}
{{- $data := merge (dict) .data $there -}}
{{- $annotations := get (get $found "metadata" | default dict) "annotations" | default dict -}}
{{- if or (ne (toJson $data) (toJson $there)) (ne (get $annotations "helm.sh/resource-policy" | default "") "keep") }}
---
apiVersion: v1
kind: Secret
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "paceline.labels" (dict "root" .root "component" .component) | nindent 4 }}
  annotations:
    helm.sh/hook: pre-install,pre-upgrade
    helm.sh/hook-delete-policy: before-hook-creation
    helm.sh/resource-policy: keep
type: Opaque
data:
  {{- toYaml $data | nindent 2 }}
{{ end -}}
{{- end -}}
