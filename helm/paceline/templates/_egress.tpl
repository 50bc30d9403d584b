{{/* Connections that pods may make. They follow from the same table as those that pods accept. */}}

{{/* Components with policies of their own: those of the table, and the pods that nobody calls, without a port. */}}
{{- define "paceline.reachable" -}}
{{- $all := include "paceline.components" . | fromYaml -}}
{{- $_ := set $all "test" (dict "port" 0 "callers" list) -}}
{{- if eq (include "paceline.modelFrom" .) "job" }}{{ $_ := set $all "model" (dict "port" 0 "callers" list) }}{{ end -}}
{{- toYaml $all -}}
{{- end -}}

{{/* Peers anywhere, inside the cluster or outside, but for what gives a node's credentials away: the metadata of clouds
(link-local addresses, and those of Alibaba Cloud, Azure, AWS and Google). */}}
{{- define "paceline.elsewhere" -}}
- namespaceSelector: {}
- ipBlock: {cidr: 0.0.0.0/0, except: [169.254.0.0/16, 100.100.100.200/32, 168.63.129.16/32]}
- ipBlock: {cidr: "::/0", except: ["fe80::/10", "fd00:ec2::254/128", "fd20:ce::254/128"]}
{{- end -}}

{{/* A rule for connections there. Takes ports; none: all of TCP. */}}
{{- define "paceline.toElsewhere" -}}
- to:
    {{- include "paceline.elsewhere" . | nindent 4 }}
  ports:
    {{- range .ports }}
    - {protocol: TCP, port: {{ . }}}
    {{- else }}
    - {protocol: TCP, port: 1, endPort: 65535}
    {{- end }}
{{- end -}}

{{/* Rules of a component's pods. Takes root and component. */}}
{{- define "paceline.egress" -}}
{{- $component := .component -}}
{{- $root := .root -}}
{{- $policies := .root.Values.networkPolicy -}}
{{- $services := include "paceline.components" .root | fromYaml -}}
{{- $self := include "paceline.selector" (dict "root" $root "component" $component) | fromYaml -}}
{{- $rules := list -}}
{{- if ne $component "redis" }}{{ $rules = concat $rules $policies.egress.dns }}{{ end -}}
{{- range $name, $it := $services -}}
{{- if has $component $it.callers -}}
{{- $to := include "paceline.selector" (dict "root" $root "component" $name) | fromYaml -}}
{{- $rules = append $rules (dict "to" (list (dict "podSelector" (dict "matchLabels" $to))) "ports" (list (dict "protocol" "TCP" "port" (int $it.port)))) -}}
{{- end -}}
{{- end -}}
{{- if eq $component "generation" -}}
{{- $rules = append $rules (dict "to" (list (dict "podSelector" (dict "matchLabels" $self))) "ports" (list (dict "protocol" "TCP" "port" 7510 "endPort" 7517))) -}}
{{- end -}}
{{- $ports := list -}}
{{- if has $component (keys (omit $services "redis")) -}}
{{- with $root.Values.tracing.endpoint }}{{ $ports = append $ports (regexFind "[0-9]+/?$" . | trimSuffix "/" | int) }}{{ end -}}
{{- if and (ne $component "facade") (not $root.Values.redis.embedded.enabled) -}}
{{- $port := include "paceline.redisPort" $root | int -}}
{{- if $port }}{{ $ports = append $ports $port }}{{ else }}{{ $rules = concat $rules (include "paceline.toElsewhere" (dict "ports" list) | fromYamlArray) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if and (eq $component "policy") (include "paceline.scales" $root) }}{{ $ports = concat $ports (list 443 6443) }}{{ end -}}
{{- $from := include "paceline.modelFrom" $root -}}
{{- if or (and (eq $component "model") (eq $from "job")) (and (eq $component "generation") (eq $from "instance")) -}}
{{- $source := $root.Values.model.download.source -}}
{{- if not (hasPrefix "file:" $source) -}}
{{- $port := regexReplaceAll "^https?://[^/]*?(?::([0-9]+))?(?:/.*)?$" $source "${1}" -}}
{{- $ports = append $ports (ternary (int $port) (ternary 80 443 (hasPrefix "http://" $source)) (regexMatch "^[0-9]+$" $port)) -}}
{{- end -}}
{{- end -}}
{{- with $ports | uniq }}{{ $rules = concat $rules (include "paceline.toElsewhere" (dict "ports" .) | fromYamlArray) }}{{ end -}}
{{- $rules = concat $rules (get $policies.egress.extra $component | default list) -}}
{{- if $rules }}{{ toYaml $rules }}{{ else }}[]{{ end -}}
{{- end -}}

{{/* Port of an external Redis, 0 where it is not known: in a secret's address, behind Sentinels, or on a cluster's nodes. */}}
{{- define "paceline.redisPort" -}}
{{- $external := .Values.redis.external -}}
{{- $place := "" -}}
{{- if $external.hosts -}}
{{- if eq $external.kind "single" }}{{ $place = index $external.hosts 0 }}{{ end -}}
{{- else if and (not $external.existingSecret) (regexMatch "^rediss?://" $external.url) -}}
{{- $place = regexReplaceAll "^rediss?://(?:[^/@]*@)?([^/?]*).*$" $external.url "${1}" -}}
{{- end -}}
{{- if not $place }}0{{ else if regexMatch ":[0-9]+$" $place }}{{ regexFind "[0-9]+$" $place }}{{ else }}6379{{ end -}}
{{- end -}}
