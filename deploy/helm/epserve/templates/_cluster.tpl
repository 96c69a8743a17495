{{/* Name of what gateways, routers and workers are together: the release, or the one that it joins. */}}
{{- define "epserve.cluster" -}}
{{- .Values.joins.release | default .Release.Name -}}
{{- end -}}

{{- define "epserve.routerAddress" -}}
{{- .Values.joins.router | default (include "epserve.name" (dict "root" . "component" "router")) }}:8001
{{- end -}}
