{{/* Names, labels, images and flags. Where a context is a dict: root (the chart's), component. */}}

{{/* Start of every name. Short, because controllers append to it and labels end at 63 letters; a
     release whose name is cut keeps a hash of it, so that no two releases meet. */}}
{{- define "epserve.base" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if gt (len .Release.Name) 28 -}}
{{- printf "%s-%s" (trunc 19 .Release.Name | trimSuffix "-") (sha256sum .Release.Name | trunc 8) -}}
{{- else -}}
{{- .Release.Name -}}
{{- end -}}
{{- end -}}

{{/* Name of an object. NOTE: no component may end with "-" and another component: then
     "a" + "b-c" and "a-b" + "c" would be the same name in two releases. */}}
{{- define "epserve.name" -}}
{{- printf "%s-%s" (include "epserve.base" .root) .component -}}
{{- end -}}

{{/* What selects pods: never changes while a release lives, so it holds no version. */}}
{{- define "epserve.selector" -}}
app.kubernetes.io/name: epserve
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of pods. Without the chart's version: a new chart with the same pods restarts none. */}}
{{- define "epserve.podLabels" -}}
{{ include "epserve.selector" . }}
app.kubernetes.io/part-of: {{ include "epserve.cluster" .root }}
app.kubernetes.io/version: {{ include "epserve.version" .root | quote }}
{{- if has .component (list "prefill" "decode") }}
epserve.io/role: {{ .component }}
{{- end }}
{{- end -}}

{{/* Labels of every other object. */}}
{{- define "epserve.labels" -}}
{{ include "epserve.selector" . }}
app.kubernetes.io/part-of: {{ include "epserve.cluster" .root }}
app.kubernetes.io/version: {{ include "epserve.version" .root | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "epserve.metadata" -}}
name: {{ include "epserve.name" . }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "epserve.labels" . | nindent 2 }}
{{- end -}}

{{- define "epserve.version" -}}
{{- .Values.image.tag | default .Chart.AppVersion | trunc 63 -}}
{{- end -}}

{{- define "epserve.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (include "epserve.version" .) -}}
{{- end -}}
{{- end -}}

{{/* Flags of a process, one list item each, from a map by name. */}}
{{- define "epserve.flags" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- --{{ if not $value }}no-{{ end }}{{ $name }}
{{- else if kindIs "string" $value }}
- {{ printf "--%s=%s" $name $value | quote }}
{{- else }}
{{- /* NOTE: printed by itself, a large number becomes 2.097152e+06. */}}
- {{ printf "--%s=%s" $name (toJson $value) | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Flags of every process: what it tells of itself. */}}
{{- define "epserve.observed" -}}
- --metrics-port=9100
- --log-level={{ .Values.log.level }}
- --log-format={{ .Values.log.format }}
{{- with .Values.tracing.otlpEndpoint }}
- --otlp-endpoint={{ . }}
- --trace-sample-ratio={{ $.Values.tracing.sampleRatio }}
{{- end }}
{{- end -}}

{{/* Environment of a process: what only the cluster knows, then a map of texts or valueFrom by
     name. */}}
{{- define "epserve.env" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
# The root file system is read-only.
- name: HOME
  value: /tmp
{{- range $name, $value := . }}
- name: {{ $name }}
  {{- if kindIs "map" $value }}
  {{- toYaml $value | nindent 2 }}
  {{- else }}
  value: {{ $value | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Name of the Secret for API keys or of that for the admin token, empty when there is none. */}}
{{- define "epserve.apiKeysSecret" -}}
{{- with .Values.gateway.apiKeys }}{{ .secret | default (ternary (include "epserve.name" (dict "root" $ "component" "api-keys")) "" (not (empty .lines))) }}{{ end -}}
{{- end -}}

{{- define "epserve.adminTokenSecret" -}}
{{- with .Values.router.adminToken }}{{ .secret | default (ternary (include "epserve.name" (dict "root" $ "component" "admin-token")) "" (not (empty .value))) }}{{ end -}}
{{- end -}}
