{{/* Number of instances in a pool's manifest. Nobody's number is owned twice:

- A scaler's number (autoscale) is in no manifest, from the installation on. Kubernetes begins with one.
- Otherwise it is `replicas` of the pool, until somebody scales by hand (kubectl scale, or a scaler that was switched off).
  From then on that number stays.

A field cannot simply leave the manifest where it was in the one before: both a three-way merge (Helm 3) and server-side apply
(Helm 4, if nobody else has written the field) set it back to the default, one. Hence there it keeps the number of the cluster.
An annotation says of a manifest that it had none, so that the next has none either and rollbacks leave the number alone. */}}

{{/* The number, "" for none. Takes root, component, pool and values. */}}
{{- define "paceline.replicas" -}}
{{- $state := include "paceline.replicaState" . | fromYaml -}}
{{- $scaler := include "paceline.scaler" (dict "root" .root "pool" .values) -}}
{{- if not $state.found -}}
{{- if not $scaler }}{{ .values.replicas | int }}{{ end -}}
{{- else if not (or $scaler $state.others) -}}
{{ .values.replicas | int }}
{{- else if not $state.free -}}
{{ $state.replicas | int }}
{{- end -}}
{{- end -}}

{{/* Annotation of a StatefulSet whose manifest has no number. */}}
{{- define "paceline.scaledByOthers" -}}
paceline.io/replicas
{{- end -}}

{{/* What the cluster says of a pool's number, as YAML: found; replicas; others, who have scaled it; and free, whether the field
may leave the manifest: it was in none before, or Helm 4 applies server-side and does not own it alone. Takes what
`paceline.replicas` does. */}}
{{- define "paceline.replicaState" -}}
{{- $there := lookup "apps/v1" "StatefulSet" .root.Release.Namespace (include "paceline.name" .) | default dict -}}
{{- $metadata := $there.metadata | default dict -}}
{{- $left := hasKey ($metadata.annotations | default dict) (include "paceline.scaledByOthers" .) -}}
{{- $others := list -}}
{{- $applied := false -}}
{{- $owned := false -}}
{{- $written := false -}}
{{- range get $metadata "managedFields" | default list -}}
{{- $fields := get (.fieldsV1 | default dict) "f:spec" | default dict -}}
{{- if and (eq .operation "Apply") (hasKey $fields "f:template") }}{{ $applied = true }}{{ end -}}
{{- if hasKey $fields "f:replicas" -}}
{{- $written = true -}}
{{- if or (eq (.subresource | default "") "scale") (hasPrefix "kubectl" .manager) -}}
{{- $others = append $others .manager -}}
{{- else if eq .operation "Apply" -}}
{{- $owned = true -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- /* Kubernetes notes no writer of a scale whose number nobody has applied. */ -}}
{{- if and (not $others) (or $left (and $applied (not $written))) }}{{ $others = append $others "a scaler" }}{{ end -}}
{{- $alone := and $owned (not $others) -}}
{{- $free := or $left (and $applied (not $alone) (semverCompare ">=4-0" .root.Capabilities.HelmVersion.Version)) -}}
{{- dict "found" (gt (len $there) 0) "replicas" (get ($there.spec | default dict) "replicas") "others" (uniq $others) "free" $free | toYaml -}}
{{- end -}}
