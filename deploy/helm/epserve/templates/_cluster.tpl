{{/* Name of what gateways, routers and workers are together: the release, or the one that it joins. */}}
{{- define "epserve.cluster" -}}
{{- .Values.joins.release | default .Release.Name -}}
{{- end -}}

{{- define "epserve.routerAddress" -}}
{{- .Values.joins.router | default (include "epserve.name" (dict "root" . "component" "router")) }}:8001
{{- end -}}

{{/* Name of the Secret with the cluster's token: who joins a release has that of its router. */}}
{{- define "epserve.clusterTokenSecret" -}}
{{- $base := .Values.joins.router | default "" | regexFind "^[^.:]+" | trimSuffix "-router" | default (include "epserve.base" .) }}
{{- .Values.cluster.token.secret | default (printf "%s-cluster-token" $base) -}}
{{- end -}}

{{/* What lets a process, and every ctl in its pod, into the cluster; as JSON. */}}
{{- define "epserve.clusterEnv" -}}
{{- $env := dict }}
{{- if has .component (list "gateway" "router" "prefill" "decode") }}
{{- $_ := set $env "EPSERVE_CLUSTER_TOKEN_FILE" "/etc/epserve/cluster/cluster-token" }}
{{- if .root.Values.cluster.tlsSecret }}
{{- range $variable, $file := dict "CERT" "tls.crt" "KEY" "tls.key" "CA" "ca.crt" }}
{{- $_ := set $env (printf "EPSERVE_CLUSTER_TLS_%s" $variable) (printf "/etc/epserve/cluster/%s" $file) }}
{{- end }}
{{- end }}
{{- if and .root.Values.cluster.insecure (ne .component "gateway") }}
{{- $_ := set $env "EPSERVE_INSECURE_CLUSTER" "true" }}
{{- end }}
{{- end }}
{{- toJson $env }}
{{- end -}}

{{- define "epserve.clusterMount" -}}
- name: cluster
  mountPath: /etc/epserve/cluster
  readOnly: true
{{- end -}}

{{- define "epserve.clusterVolume" -}}
- name: cluster
  projected:
    sources:
      - secret: {name: {{ include "epserve.clusterTokenSecret" . }}}
      {{- with .Values.cluster.tlsSecret }}
      - secret: {name: {{ . }}}
      {{- end }}
{{- end -}}
