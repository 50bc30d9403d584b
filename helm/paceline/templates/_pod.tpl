{{/* Common parts of pods. */}}

{{/* First part of a pod's spec. Takes root, component, values (of the component) and spread (whether replicas go
to different nodes). */}}
{{- define "paceline.pod" -}}
{{- $values := .root.Values -}}
serviceAccountName: {{ include "paceline.fullname" .root }}{{ if eq .component "policy" }}-policy{{ end }}
automountServiceAccountToken: {{ and (eq .component "policy") (eq (include "paceline.scales" .root) "true") }}
# Variables of service links would begin with PACELINE_, too.
enableServiceLinks: false
{{- with $values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  {{- if ne nil $values.podSecurity.runAsUser }}
  runAsUser: {{ $values.podSecurity.runAsUser | int64 }}
  runAsGroup: {{ $values.podSecurity.runAsUser | int64 }}
  {{- end }}
  {{- if ne nil $values.podSecurity.fsGroup }}
  fsGroup: {{ $values.podSecurity.fsGroup | int64 }}
  fsGroupChangePolicy: OnRootMismatch
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with concat (.tolerations | default list) .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .values.affinity }}
affinity:
  {{- toYaml .values.affinity | nindent 2 }}
{{- else if .spread }}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "paceline.selector" (dict "root" .root "component" .component) | nindent 14 }}
{{- end }}
{{- end -}}

{{/* Tolerations by which a single pod leaves a lost node within seconds rather than minutes. */}}
{{- define "paceline.leaveDeadNodes" -}}
tolerations:
  - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 15}
  - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 15}
{{- end -}}

{{- define "paceline.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Name of a component's port, which says its protocol. */}}
{{- define "paceline.portName" -}}
{{ if eq .component "facade" }}http{{ else }}grpc{{ end }}
{{- end -}}

{{/* Ports of a container. Takes root and component. */}}
{{- define "paceline.ports" -}}
- {name: {{ include "paceline.portName" . }}, containerPort: {{ include "paceline.port" . }}}
- {name: metrics, containerPort: 9400}
{{- end -}}

{{/* Health check. Takes root, component and service ("" or "liveness"). The kubelet asks itself
where there is no TLS: it speaks none. */}}
{{- define "paceline.ask" -}}
{{- $port := include "paceline.port" . -}}
{{- if eq .component "facade" -}}
{{- $path := ternary "/livez" "/readyz" (eq .service "liveness") -}}
{{- if include "paceline.tls" .root -}}
exec:
  command:
    - python
    - -m
    - services.facade.probe
    - --address=127.0.0.1:{{ $port }}
    - --server-name={{ include "paceline.serverName" . }}
    - --path={{ $path }}
{{- else -}}
httpGet: {port: {{ $port }}, path: {{ $path }}}
{{- end -}}
{{- else if include "paceline.tls" .root -}}
exec:
  command:
    - python
    - -m
    - services.platform.grpc.health
    - --address=127.0.0.1:{{ $port }}
    - --server-name={{ include "paceline.serverName" . }}
    - --service={{ .service }}
{{- else -}}
grpc: {port: {{ $port }}, service: {{ .service | quote }}}
{{- end -}}
{{- end -}}

{{/* Probes of a container. Takes root, component and startupSeconds. */}}
{{- define "paceline.probes" -}}
{{- $live := dict "root" .root "component" .component "service" "liveness" -}}
{{- $ready := dict "root" .root "component" .component "service" "" -}}
startupProbe:
  {{- include "paceline.ask" $live | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add .startupSeconds 4) 5 }}
livenessProbe:
  {{- include "paceline.ask" $live | nindent 2 }}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 3
readinessProbe:
  {{- include "paceline.ask" $ready | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end -}}

{{- define "paceline.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /cache}
- {name: token, mountPath: /etc/paceline/token, readOnly: true}
- {name: grants, mountPath: /etc/paceline/grants, readOnly: true}
{{- if include "paceline.tls" . }}
- {name: tls, mountPath: /etc/paceline/tls, readOnly: true}
{{- end }}
{{- end -}}

{{/* Volumes of `paceline.mounts`. Takes root, component and cacheSize. Secrets are mounted as folders: only so
do the files change when the secret does. */}}
{{- define "paceline.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
- name: cache
  emptyDir: {sizeLimit: {{ .cacheSize | default "1Gi" }}}
- name: token
  secret: {secretName: {{ include "paceline.tokenSecret" .root }}, defaultMode: 0440}
- name: grants
  secret: {secretName: {{ include "paceline.grantsSecret" .root }}, defaultMode: 0440}
{{- if include "paceline.tls" .root }}
- name: tls
  secret: {secretName: {{ include "paceline.tlsSecret" . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* The volume of models and weights. */}}
{{- define "paceline.weightsMount" -}}
- {name: weights, mountPath: {{ .Values.weights.mountPath }}, readOnly: true}
{{- end -}}
{{- define "paceline.weightsVolume" -}}
- name: weights
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-weights" (include "paceline.fullname" .)) .Values.weights.existingClaim }}
    readOnly: true
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

{{/* Names of the deployed pools whose instances take part in weight broadcasts. */}}
{{- define "paceline.broadcastTo" -}}
{{- $found := list -}}
{{- range (include "paceline.pools" $ | fromYaml).pools -}}
{{- if get .config "weight_collective" }}{{ $found = append $found .name }}{{ end -}}
{{- end -}}
{{- join ", " $found -}}
{{- end -}}

{{/* The deployment of a service that has one pod at work. Takes root, component, replicas, strategy, config and
weights (whether it looks at models). */}}
{{- define "paceline.deployment" -}}
{{- $values := get .root.Values .component -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "paceline.name" . }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "paceline.labels" . | nindent 4 }}
spec:
  replicas: {{ .replicas | int }}
  strategy:
    {{- toYaml .strategy | nindent 4 }}
  selector:
    matchLabels:
      {{- include "paceline.selector" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "paceline.selector" . | nindent 8 }}
      {{- with $values.podAnnotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      {{- $stay := include "paceline.leaveDeadNodes" . | fromYaml }}
      {{- $pod := dict "root" .root "component" .component "values" $values "spread" true }}
      {{- include "paceline.pod" (merge $pod $stay) | nindent 6 }}
      terminationGracePeriodSeconds: {{ add 15 (get .config "shutdown_grace_seconds" | default 10) }}
      containers:
        - name: {{ .component }}
          image: {{ include "paceline.image" (dict "root" .root "image" .root.Values.image.control) }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          args: [services.{{ .component }}]
          env:
            {{- include "paceline.environment" (dict "root" .root "component" .component "advertise" (include "paceline.host" .) "config" .config "extraEnv" $values.extraEnv) | nindent 12 }}
            {{- if eq .component "facade" }}
            - name: PACELINE_GATEWAY
              value: {{ include "paceline.host" (dict "root" .root "component" "gateway") }}:{{ .root.Values.gateway.service.port | int }}
            {{- end }}
            {{- if eq .component "policy" }}
            {{- include "paceline.scalingEnvironment" .root | nindent 12 }}
            {{- end }}
          ports:
            {{- include "paceline.ports" . | nindent 12 }}
          {{- include "paceline.probes" (dict "root" .root "component" .component "startupSeconds" 120) | nindent 10 }}
          resources:
            {{- toYaml $values.resources | nindent 12 }}
          securityContext:
            {{- include "paceline.containerSecurity" . | nindent 12 }}
          volumeMounts:
            {{- include "paceline.mounts" .root | nindent 12 }}
            {{- $weights := and .weights .root.Values.weights.enabled }}
            {{- if $weights }}
            {{- include "paceline.weightsMount" .root | nindent 12 }}
            {{- end }}
            {{- with $values.extraVolumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        {{- include "paceline.volumes" . | nindent 8 }}
        {{- if $weights }}
        {{- include "paceline.weightsVolume" .root | nindent 8 }}
        {{- end }}
        {{- with $values.extraVolumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
{{- end -}}

{{/* Protocol of the gRPC ports, as a service mesh is told: it must not look into TLS that is not its own. */}}
{{- define "paceline.appProtocol" -}}
{{ if include "paceline.tls" . }}tls{{ else }}grpc{{ end }}
{{- end -}}

{{/* The service of a component. Takes root and component. Callers know by the registry who is there, so they are
let through before the pod is ready. */}}
{{- define "paceline.service" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "paceline.name" . }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "paceline.labels" . | nindent 4 }}
spec:
  {{- if .headless }}
  clusterIP: None
  {{- end }}
  publishNotReadyAddresses: true
  selector:
    {{- include "paceline.selector" . | nindent 4 }}
  ports:
    {{- $name := include "paceline.portName" . }}
    {{- $protocol := ternary (ternary "https" "http" (eq (include "paceline.tls" .root) "true")) (include "paceline.appProtocol" .root) (eq $name "http") }}
    - {name: {{ $name }}, port: {{ include "paceline.port" . }}, targetPort: {{ $name }}, appProtocol: {{ $protocol }}}
{{- end -}}
