{{/* What the values ask for and nobody can give: images without a registry, and what this cluster lacks. Only a real one is
asked: Helm's list of APIs for `helm template` lacks that of the aggregation layer, which every API server has. */}}

{{- define "paceline.check" -}}
{{- if .Values.checkCluster -}}
{{- $missing := list -}}
{{- if .Capabilities.APIVersions.Has "apiregistration.k8s.io/v1" -}}
{{- range (include "paceline.neededApis" . | fromYaml).apis -}}
{{- $api := .api -}}
{{- if not ($.Capabilities.APIVersions.Has $api) -}}
{{- $missing = append $missing (printf "%s needs %s, which this cluster does not serve: install %s, or %s." .value $api .by .or) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if ne .Values.image.pullPolicy "Never" -}}
{{- range (include "paceline.images" . | fromYaml).images -}}
{{- if not (contains "/" .) -}}
{{- $missing = append $missing (printf "image.registry names no registry for %s, and there are no public images: build and push them (docs/operations.md, Images), or set image.pullPolicy to Never if the nodes have them." .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $missing -}}
{{- fail (printf "\n\n%s\n\n(checkCluster=false leaves this check out.)" (join "\n" $missing)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* APIs that the values need beyond Kubernetes' own, under "apis" in a map: value, which asks for it; api; by, who has it; or, what
else can be done. */}}
{{- define "paceline.neededApis" -}}
{{- $apis := list -}}
{{- if eq .Values.tls.mode "certManager" -}}
{{- $apis = append $apis (dict "value" "tls.mode certManager" "api" "cert-manager.io/v1/Certificate" "by" "cert-manager" "or" "set tls.mode to secrets (certificates of your own) or to none (a network that you trust)") -}}
{{- end -}}
{{- range $value, $kind := dict "podMonitors" "PodMonitor" "rules" "PrometheusRule" -}}
{{- if (get $.Values.monitoring $value).enabled -}}
{{- $name := printf "monitoring.%s.enabled" $value -}}
{{- $apis = append $apis (dict "value" $name "api" (printf "monitoring.coreos.com/v1/%s" $kind) "by" "the Prometheus operator" "or" (printf "set %s to false" $name)) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.autoscale.enabled (eq .Values.autoscale.by "keda") -}}
{{- $apis = append $apis (dict "value" "autoscale.by keda" "api" "keda.sh/v1alpha1/ScaledObject" "by" "KEDA" "or" "set autoscale.by to policy") -}}
{{- end -}}
{{- range $component := list "gateway" "facade" -}}
{{- $route := (get $.Values $component).route -}}
{{- if and $route.enabled (or (eq $component "gateway") $.Values.facade.enabled) -}}
{{- $api := printf "%s/%s" (include "paceline.routeApi" $route) $route.kind -}}
{{- $apis = append $apis (dict "value" (printf "%s.route.kind %s" $component $route.kind) "api" $api "by" "the Gateway API's definitions" "or" (printf "set %s.route.apiVersion to one that it serves" $component)) -}}
{{- end -}}
{{- end -}}
{{- dict "apis" $apis | toYaml -}}
{{- end -}}

{{/* Images of ours that the values need, under "images" in a map. */}}
{{- define "paceline.images" -}}
{{- $images := list .Values.image.control -}}
{{- $devices := list -}}
{{- range (include "paceline.pools" . | fromYaml).pools }}{{ $devices = append $devices .device }}{{ end -}}
{{- if .Values.drafter.enabled }}{{ $devices = append $devices .Values.drafter.device }}{{ end -}}
{{- range $devices }}{{ $images = append $images (ternary $.Values.image.generationCuda $.Values.image.generationCpu (eq . "cuda")) }}{{ end -}}
{{- $named := list -}}
{{- range $images }}{{ $named = append $named (include "paceline.image" (dict "root" $ "image" .)) }}{{ end -}}
{{- dict "images" (uniq $named) | toYaml -}}
{{- end -}}
