{{/* Parts of a pod that all processes share. The context of each is a dict: root, component,
     placement, and pod: the values' `pods` with the component's own `pod` over them. */}}

{{/* The last of these as JSON, of a list: root, the component's own. */}}
{{- define "epserve.pod" -}}
{{- mustMergeOverwrite (deepCopy (index . 0).Values.pods) (index . 1) | toJson }}
{{- end -}}

{{/* Name of the account that a component's pods have: an existing one, or the chart's. */}}
{{- define "epserve.serviceAccount" -}}
{{- $account := ternary "router" "pods" (eq .component "router") }}
{{- index .root.Values.serviceAccounts $account | default (include "epserve.name" (dict "root" .root "component" $account)) }}
{{- end -}}

{{/* Takes annotations besides: those that the chart itself gives. */}}
{{- define "epserve.podMetadata" -}}
labels:
  {{- include "epserve.podLabels" . | nindent 2 }}
  {{- with .pod.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  {{- toYaml (merge (dict) .annotations .pod.annotations) | nindent 2 }}
{{- end -}}

{{/* What stands above the containers. Takes sysctls besides. */}}
{{- define "epserve.podHead" -}}
serviceAccountName: {{ include "epserve.serviceAccount" . }}
automountServiceAccountToken: {{ and (eq .component "router") (eq .root.Values.router.discovery "kubernetes") }}
# Variables named after Services (EPSERVE_...) would be taken for settings.
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- $security := deepCopy .pod.podSecurityContext }}
  {{- with .sysctls }}
  {{- $_ := set $security "sysctls" (concat . ($security.sysctls | default list)) }}
  {{- end }}
  {{- toYaml $security | nindent 2 }}
{{- range $name, $value := .placement }}
{{- with $value }}
{{ toYaml (dict $name .) }}
{{- end }}
{{- end }}
{{- if and (has .component (list "gateway" "router")) (not .placement.topologySpreadConstraints) }}
# Replicas apart from each other, where there is room.
topologySpreadConstraints:
  {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "epserve.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- $download := include "epserve.modelDownload" . | trim }}
{{- if or $download .pod.initContainers }}
initContainers:
  {{- with $download }}{{ . | nindent 2 }}{{ end }}
  {{- with .pod.initContainers }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- end -}}

{{/* Of the process's container: what needs no knowledge of the process. Takes env besides, and
     capabilities, which are added. */}}
{{- define "epserve.container" -}}
image: {{ include "epserve.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
env:
  {{- include "epserve.env" (merge (dict) .env (include "epserve.clusterEnv" . | fromJson)) | trim | nindent 2 }}
{{- with .pod.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- include "epserve.containerSecurity" . | nindent 2 }}
{{- end -}}

{{- define "epserve.containerSecurity" -}}
{{- $security := deepCopy .pod.containerSecurityContext }}
{{- with .capabilities }}
{{- $given := $security.capabilities | default dict }}
{{- $_ := set $security "capabilities" (set $given "add" (concat . ($given.add | default list) | uniq)) }}
{{- end }}
{{- toYaml $security }}
{{- end -}}

{{/* Probes of a process. Takes startSeconds besides: how long its start may take; and startup, a
     command that says whether it is over. */}}
{{- define "epserve.probes" -}}
{{- $probes := dict
  "startup" (ternary (dict "periodSeconds" 10 "timeoutSeconds" 10) (dict "periodSeconds" 2 "timeoutSeconds" 5) (hasKey . "startup"))
  "readiness" (dict "periodSeconds" 3 "timeoutSeconds" 3 "failureThreshold" 2)
  "liveness" (dict "periodSeconds" 10 "timeoutSeconds" 10 "failureThreshold" 6) }}
{{- range $name, $timing := $probes }}
{{- $timing = merge (dict) (index $.pod.probes $name) $timing }}
{{- if not $timing.failureThreshold }}
{{- $_ := set $timing "failureThreshold" (add1 (div $.startSeconds $timing.periodSeconds)) }}
{{- end }}
{{ $name }}Probe:
  {{- if and $.startup (eq $name "startup") }}
  exec:
    command: [sh, -c, {{ $.startup | quote }}]
  {{- else if eq $.component "gateway" }}
  {{- /* 503 at /ready while there is no pair of workers, and from SIGTERM on. */}}
  httpGet: {path: {{ ternary "/ready" "/version" (eq $name "readiness") }}, port: http{{ if $.root.Values.gateway.tlsSecret }}, scheme: HTTPS{{ end }}}
  {{- else if $.root.Values.cluster.tlsSecret }}
  {{- /* As below. The kubelet has no certificate to show. */}}
  {{- $timing = merge (dict) (index $.pod.probes $name) (dict "periodSeconds" 10 "timeoutSeconds" 10) $timing }}
  exec:
    command:
      - ctl
      - probe
      - grpc
      - {{ printf "%s:%d" (ternary "[::1]" "127.0.0.1" (eq (include "epserve.listen" $.root) "[::]")) (ternary 8001 9000 (eq $.component "router")) | quote }}
      {{- if eq $name "liveness" }}
      - --service=liveness
      {{- end }}
  {{- else }}
  {{- /* Serving once every rank has loaded, not while it drains; alive however busy ranks are. */}}
  grpc: {port: {{ ternary 8001 9000 (eq $.component "router") }}{{ if eq $name "liveness" }}, service: liveness{{ end }}}
  {{- end }}
  {{- toYaml $timing | nindent 2 }}
{{- end }}
{{- end -}}
