{{/* Volumes of pods, and where they are mounted. */}}

{{- define "paceline.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /cache}
- {name: token, mountPath: /etc/paceline/token, readOnly: true}
- {name: grants, mountPath: /etc/paceline/grants/callers, readOnly: true}
{{- if include "paceline.metricsGrant" . }}
- {name: metrics-grant, mountPath: /etc/paceline/grants/metrics, readOnly: true}
{{- end }}
{{- if include "paceline.tls" . }}
- {name: tls, mountPath: /etc/paceline/tls, readOnly: true}
{{- end }}
{{- if include "paceline.redisAuthority" . }}
- {name: redis-authority, mountPath: /etc/paceline/redis, readOnly: true}
{{- end }}
{{- end -}}

{{/* Volumes of `paceline.mounts`. Takes root, component and, if it has one of its own, the cache's volume. Secrets are
mounted as folders: only so do the files change when the secret does. */}}
{{- define "paceline.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
- name: cache
  {{ .cache | default "emptyDir: {sizeLimit: 1Gi}" }}
- name: token
  secret: {secretName: {{ include "paceline.tokenSecret" .root }}, defaultMode: 0440}
- name: grants
  secret: {secretName: {{ include "paceline.grantsSecret" .root }}, defaultMode: 0440}
{{- if include "paceline.metricsGrant" .root }}
- name: metrics-grant
  secret: {secretName: {{ include "paceline.metricsTokenSecret" .root }}, defaultMode: 0440, items: [{key: tokens.yaml, path: tokens.yaml}]}
{{- end }}
{{- if include "paceline.tls" .root }}
- name: tls
  secret: {secretName: {{ include "paceline.tlsSecret" . }}, defaultMode: 0440}
{{- end }}
{{- with include "paceline.redisAuthority" .root }}
- name: redis-authority
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* The volume of models and weights. */}}
{{- define "paceline.weightsMount" -}}
- {name: weights, mountPath: {{ .Values.weights.mountPath }}, readOnly: true}
{{- end -}}
{{/* Takes root and writes. One volume, however many mounts: a kubelet may wait indefinitely for a claim that is two
volumes of a pod. */}}
{{- define "paceline.weightsVolume" -}}
- name: weights
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-weights" (include "paceline.fullname" .root)) .root.Values.weights.existingClaim }}
    {{- if not .writes }}
    readOnly: true
    {{- end }}
{{- end -}}

{{/* The volume of the weights that an instance keeps, "" if it has none. Takes a pool's values. */}}
{{- define "paceline.adoptedVolume" -}}
{{- if and .adoptedHostPath .adoptedClaim }}
{{- fail (printf "generation.pools: %s has both adoptedHostPath and adoptedClaim" .name) }}
{{- end -}}
{{- if hasKey .config "adopted_weights" -}}
{{- else if .adoptedClaim -}}
persistentVolumeClaim: {claimName: {{ .adoptedClaim }}}
{{- else if .adoptedHostPath -}}
hostPath: {path: {{ .adoptedHostPath }}, type: Directory}
{{- else if .adoptedSize -}}
emptyDir: {sizeLimit: {{ .adoptedSize }}{{ with .adoptedMedium }}, medium: {{ . }}{{ end }}}
{{- end -}}
{{- end -}}

{{/* The volume of what an instance compiles. Takes a pool's values. */}}
{{- define "paceline.cacheVolume" -}}
{{- if and .cacheHostPath .cacheClaim }}
{{- fail (printf "generation.pools: %s has both cacheHostPath and cacheClaim" .name) }}
{{- end -}}
{{- if .cacheClaim -}}
persistentVolumeClaim: {claimName: {{ .cacheClaim }}}
{{- else if .cacheHostPath -}}
hostPath: {path: {{ .cacheHostPath }}, type: Directory}
{{- else -}}
emptyDir: {sizeLimit: {{ .cacheSize }}}
{{- end -}}
{{- end -}}

{{/* Deployed pools to whose instances weights can be pushed, as "name: volume, ...". */}}
{{- define "paceline.pushedTo" -}}
{{- $found := list -}}
{{- range (include "paceline.pools" $ | fromYaml).pools -}}
{{- $volume := include "paceline.adoptedVolume" . -}}
{{- if hasKey .config "adopted_weights" }}{{ $volume = get .config "adopted_weights" }}{{ end -}}
{{- if $volume }}{{ $found = append $found (printf "%s (%s)" .name $volume) }}{{ end -}}
{{- end -}}
{{- join ", " $found -}}
{{- end -}}

{{/* The claim of each pod of a StatefulSet. Takes name and values, with size and storageClassName. */}}
{{- define "paceline.claimTemplate" -}}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ .name }}
spec:
  accessModes: [ReadWriteOnce]
  {{- with .values.storageClassName }}
  storageClassName: {{ . }}
  {{- end }}
  resources:
    requests:
      storage: {{ .values.size }}
{{- end -}}
