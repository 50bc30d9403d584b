{{/* The embedded Redis: its containers. Both take root, component and values. */}}

{{/* An image with a registry of its own. */}}
{{- define "paceline.foreignImage" -}}
{{ .repository }}:{{ .tag }}{{ with .digest }}@{{ . }}{{ end }}
{{- end -}}

{{/* Pull policy of such an image: nodes that have ours need not have it. */}}
{{- define "paceline.foreignPull" -}}
{{ ternary "IfNotPresent" .Values.image.pullPolicy (eq .Values.image.pullPolicy "Never") }}
{{- end -}}

{{- define "paceline.redisContainer" -}}
{{- $tls := include "paceline.tls" .root -}}
name: redis
image: {{ include "paceline.foreignImage" .root.Values.image.redis }}
imagePullPolicy: {{ include "paceline.foreignPull" .root }}
command: [valkey-server]
args:
  - --dir
  - /data
  - --appendonly
  - "yes"
  - --appendfsync
  - everysec
  # The append-only file suffices, and keys are never evicted.
  - --save
  - ""
  - --maxmemory
  - {{ .values.maxMemory | quote }}
  - --maxmemory-policy
  - noeviction
  # Passwords are in no argument, which everybody on the node can read.
  - --aclfile
  - /etc/paceline/redis/users.acl
  {{- if $tls }}
  - --port
  - "0"
  - --tls-port
  - "6379"
  - --tls-cert-file
  - /etc/paceline/tls/tls.crt
  - --tls-key-file
  - /etc/paceline/tls/tls.key
  - --tls-ca-cert-file
  - /etc/paceline/tls/ca.crt
  - --tls-auth-clients
  - {{ ternary "yes" "no" .root.Values.tls.clientAuth | quote }}
  {{- end }}
{{- with .values.extraEnv }}
env:
  {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - {name: redis, containerPort: 6379}
startupProbe:
  # Loading a large file takes long.
  tcpSocket: {port: redis}
  periodSeconds: 5
  failureThreshold: 120
livenessProbe:
  tcpSocket: {port: redis}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 9
readinessProbe:
  # Callers wait for one that loads.
  tcpSocket: {port: redis}
  periodSeconds: 5
  timeoutSeconds: 5
resources:
  {{- toYaml .values.resources | nindent 2 }}
{{- end -}}

{{/* Its metrics, in plain text only where the rest is. */}}
{{- define "paceline.redisExporter" -}}
{{- $tls := include "paceline.tls" .root -}}
name: exporter
image: {{ include "paceline.foreignImage" .root.Values.image.redisExporter }}
imagePullPolicy: {{ include "paceline.foreignPull" .root }}
env:
  - name: REDIS_ADDR
    value: {{ ternary "rediss" "redis" (eq $tls "true") }}://localhost:6379
  - name: REDIS_USER
    value: exporter
  - name: REDIS_PASSWORD
    valueFrom: {secretKeyRef: {name: {{ include "paceline.redisSecret" .root }}, key: exporter}}
  {{- if $tls }}
  # The certificate has the names by which others dial it.
  - {name: REDIS_EXPORTER_SKIP_TLS_VERIFICATION, value: "true"}
  {{- range $prefix := list "CLIENT" "SERVER" }}
  - {name: REDIS_EXPORTER_TLS_{{ $prefix }}_CERT_FILE, value: /etc/paceline/tls/tls.crt}
  - {name: REDIS_EXPORTER_TLS_{{ $prefix }}_KEY_FILE, value: /etc/paceline/tls/tls.key}
  {{- end }}
  {{- if .root.Values.tls.clientAuth }}
  - {name: REDIS_EXPORTER_TLS_SERVER_CA_CERT_FILE, value: /etc/paceline/tls/ca.crt}
  {{- end }}
  {{- end }}
ports:
  - {name: exporter, containerPort: 9121}
resources:
  {{- toYaml .values.exporter.resources | nindent 2 }}
securityContext:
  {{- include "paceline.context" .values.securityContext | nindent 2 }}
{{- if $tls }}
volumeMounts:
  - {name: tls, mountPath: /etc/paceline/tls, readOnly: true}
{{- end }}
{{- end -}}

{{/* Rules of the embedded Redis's users, without their passwords. */}}
{{- define "paceline.redisRules" -}}
{{- .Files.Get "files/redis-users.acl" | replace "NAMESPACE" (include "paceline.keyPrefix" .) -}}
{{- end -}}

{{/* Keys of the secret of the embedded Redis, as YAML: a password for each user, under its name; that of the default user, for
people, under password. */}}
{{- define "paceline.redisUsers" -}}
{{- $keys := list -}}
{{- range include "paceline.redisRules" . | trim | splitList "\n" -}}
{{- $user := index (splitList " " .) 1 -}}
{{- $keys = append $keys (ternary "password" $user (eq $user "default")) -}}
{{- end -}}
{{- dict "keys" $keys | toYaml -}}
{{- end -}}

{{/* Container that writes the file of users before Redis starts: the rules, which belong to this version, with the hashes of
the passwords, which belong to nobody's manifest. Takes root and values. */}}
{{- define "paceline.redisUsersContainer" -}}
name: users
image: {{ include "paceline.foreignImage" .root.Values.image.redis }}
imagePullPolicy: {{ include "paceline.foreignPull" .root }}
command:
  - sh
  - -euc
  - |
    printf '%s\n' "$RULES" | while read -r word user rest; do
      key=$user
      [ "$user" != default ] || key=password
      hash=$(sha256sum < "/etc/paceline/passwords/$key")
      printf '%s %s %s#%s%s\n' "$word" "$user" "${rest%%PASSWORD*}" "${hash%% *}" "${rest#*PASSWORD}"
    done > /etc/paceline/redis/users.acl
env:
  - name: RULES
    value: {{ include "paceline.redisRules" .root | trim | quote }}
resources:
  {{- toYaml .values.resources | nindent 2 }}
securityContext:
  {{- include "paceline.context" .values.securityContext | nindent 2 }}
volumeMounts:
  - {name: passwords, mountPath: /etc/paceline/passwords, readOnly: true}
  - {name: users, mountPath: /etc/paceline/redis}
{{- end -}}

{{/* Address of Redis, for a component. The password comes from a variable, so that it is in no manifest. Takes root and
component. */}}
{{- define "paceline.redisEnvironment" -}}
{{- $user := .component -}}
{{- with .root -}}
{{- $redis := .Values.redis -}}
{{- if $redis.embedded.enabled -}}
{{- $host := include "paceline.host" (dict "root" . "component" "redis") -}}
{{- $tls := include "paceline.tls" . -}}
{{- $files := "ssl_ca_certs=/etc/paceline/tls/ca.crt&ssl_certfile=/etc/paceline/tls/tls.crt&ssl_keyfile=/etc/paceline/tls/tls.key" -}}
{{- /* The client verifies no name but the dialled one; the signature of our authority suffices. */ -}}
{{- if and .Values.tls.serverName (eq .Values.tls.mode "secrets") }}{{ $files = printf "%s&ssl_check_hostname=false" $files }}{{ end -}}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "paceline.redisSecret" . }}, key: {{ $user }}}}
- name: PACELINE_REDIS_URL
  value: {{ printf "%s://%s:$(REDIS_PASSWORD)@%s:6379/0%s" (ternary "rediss" "redis" (eq $tls "true")) $user $host (ternary (printf "?%s" $files) "" (eq $tls "true")) | quote }}
{{- else if $redis.external.hosts -}}
{{ include "paceline.redisHosts" $redis.external }}
{{- else if $redis.external.existingSecret -}}
- name: PACELINE_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ $redis.external.existingSecret }}, key: {{ $redis.external.secretKey }}}}
{{- else -}}
- name: PACELINE_REDIS_URL
  value: {{ required "redis.external.hosts, redis.external.url or redis.external.existingSecret is needed without redis.embedded.enabled" $redis.external.url | quote }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Variables of an address that is made from hosts. Takes redis.external. */}}
{{- define "paceline.redisHosts" -}}
{{- $kind := ternary "" (printf "+%s" .kind) (eq .kind "single") -}}
{{- if and (eq .kind "single") (ne (len .hosts) 1) }}{{ fail "redis.external.hosts: one host, unless kind is sentinel or cluster" }}{{ end -}}
{{- if and (eq .kind "cluster") (ne (int .database) 0) }}{{ fail "redis.external.database: a cluster has database 0 only" }}{{ end -}}
{{- $path := printf "/%d" (int .database) -}}
{{- if eq .kind "cluster" }}{{ $path = "" }}{{ end -}}
{{- if eq .kind "sentinel" }}{{ $path = printf "/%s%s" (required "redis.external.primaryName is needed with kind sentinel" .primaryName) $path }}{{ end -}}
{{- $user := .username -}}
{{- $options := list -}}
{{- with .password.existingSecret }}
{{- $user = printf "%s:$(REDIS_PASSWORD)" $user -}}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $.password.secretKey }}}}
{{ end -}}
{{- if and .sentinelPassword.existingSecret (eq .kind "sentinel") -}}
{{- $options = append $options "sentinel_password=$(REDIS_SENTINEL_PASSWORD)" -}}
- name: REDIS_SENTINEL_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ .sentinelPassword.existingSecret }}, key: {{ .sentinelPassword.secretKey }}}}
{{ end -}}
{{- if and .tls.enabled .tls.existingSecret }}{{ $options = append $options (printf "ssl_ca_certs=/etc/paceline/redis/%s" .tls.secretKey) }}{{ end -}}
- name: PACELINE_REDIS_URL
  value: {{ printf "%s%s://%s%s%s%s" (ternary "rediss" "redis" .tls.enabled) $kind (ternary "" (printf "%s@" $user) (eq $user "")) (join "," .hosts) $path (ternary "" (printf "?%s" (join "&" $options)) (empty $options)) | quote }}
{{- end -}}

{{/* Secret with the authority of an external Redis, "" if there is none. */}}
{{- define "paceline.redisAuthority" -}}
{{- $external := .Values.redis.external -}}
{{- if and (not .Values.redis.embedded.enabled) $external.hosts $external.tls.enabled }}{{ $external.tls.existingSecret }}{{ end -}}
{{- end -}}
